"""A batch at one moment, as the policy of the split sees it."""

from yatt.control.leader.measured import Measurements
from yatt.core.moves import Moves
from yatt.core.placement import ROLLOUT, Placement, Slab
from yatt.core.split import BatchTail


def tail_of(
    moves: Moves, placement: Placement, measured: Measurements, built: frozenset[tuple[Slab, str]]
) -> BatchTail:
    """Returns what nodes have reported last, for the slabs that rollout holds now."""
    loads, there = measured.loads.now(), set(moves.there(ROLLOUT))
    running = {
        slab.name: each.num_requests
        for index, load in loads.items()
        for each in load.slabs
        if each.role == ROLLOUT and (slab := placement.slabs_by_node[index][each.slab]) in there
    }
    judges = [role for role in placement.engine_roles if role != ROLLOUT]
    unbuilt = {role: frozenset(slab.name for slab in there if (slab, role) not in built) for role in judges}
    switch_s, build_s = measured.switch_s()
    return BatchTail(
        running=running, num_waiting=sum(load.num_waiting for load in loads.values()),
        backlog=measured.backlog(), split={role: len(moves.of(role)) for role in judges},
        switch_s=switch_s, build_s=build_s, unbuilt=unbuilt,
    )  # fmt: skip
