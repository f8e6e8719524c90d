"""A batch at one moment, as the policy of the split sees it."""

from yatt.control.leader.measured import Measurements
from yatt.core.moves import Moves
from yatt.core.placement import ROLLOUT, Placement
from yatt.core.tail import BatchTail


def tail_of(moves: Moves, placement: Placement, measured: Measurements) -> BatchTail:
    """Returns what nodes have reported last, for the slabs that rollout holds now."""
    loads = measured.loads.now()
    # Pairs of node and index, because hashing a Slab is several times slower and there may be thousands.
    there = {(slab.node, slab.index): slab.name for slab in moves.there(ROLLOUT)}
    built = {index: frozenset(load.built) for index, load in loads.items()}
    running = {
        there[index, each.slab]: each.num_requests
        for index, load in loads.items()
        for each in load.slabs
        if each.role == ROLLOUT and (index, each.slab) in there
    }
    judges = [role for role in placement.engine_roles if role != ROLLOUT]
    unbuilt = {
        role: frozenset(
            name for (node, index), name in there.items() if (index, role) not in built.get(node, ())
        )
        for role in judges
    }
    num_of, (switch_s, build_s) = moves.num_of(), measured.switch_s()
    return BatchTail(
        running=running, num_waiting=sum(load.num_waiting for load in loads.values()),
        backlog=measured.backlog(), num_asked=measured.num_asked(),
        split={role: num_of[role] for role in judges}, switch_s=switch_s,
        num_late=measured.demand().num_late, build_s=build_s, unbuilt=unbuilt,
    )  # fmt: skip
