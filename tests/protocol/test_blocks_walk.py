"""Nodes 1 and 2 run one engine, node 3 runs another: every order of losses, returns and answers."""

from dataclasses import replace

import pytest

from tests.protocol.test_phases_walk import STAYING, Step, walk
from yatt.core.phases import phases
from yatt.core.phases.phases import Phase

SPANNING = replace(
    STAYING, nodes=frozenset({0, 1, 2, 3}), pools={"rollout": frozenset({1, 2, 3})},
    blocks=(frozenset({1, 2}),), total_iterations=1,
)  # fmt: skip


@pytest.mark.parametrize(("lose_left", "join_left"), [(2, 0), (1, 1), (0, 2)])
def test_a_block_is_lost_and_admitted_as_a_whole(lose_left: int, join_left: int) -> None:
    ends = walk(phases.step, SPANNING, lose_left=lose_left, join_left=join_left, stop_left=0)
    lost = {world.lost for world in ends if world.end and world.end.exit_code == 0}
    assert frozenset({1, 2}) in lost, "the other engine went on"
    assert not any(len(each & {1, 2}) == 1 for each in lost)
    if join_left == 2:
        returned = [world for world in ends if world.end and not world.lost and max(world.lives) > 1]
        assert any(world.lives[1] > 1 and world.lives[2] > 1 for world in returned), "both came back"


@pytest.mark.slow
def test_a_block_is_lost_again_while_it_comes_back() -> None:
    walk(phases.step, SPANNING, lose_left=2, join_left=2, stop_left=0)


def loses_a_node_alone(state, event, program):
    return phases.step(state, event, replace(program, blocks=()))


def admits_a_part(state, event, program):
    """Admits who is ready, whoever is not."""
    alone = (
        replace(program, blocks=())
        if not isinstance(event, phases.NodeLost | phases.NodeKnocked)
        else program
    )
    return phases.step(state, event, alone)


def waits_for_the_rest(state, event, program):
    """Excludes the others of the block, but still expects their answers."""
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.NodeLost) and after.phase is not Phase.ENDED and event.node in (1, 2):
        excludes = tuple(action for action in actions if isinstance(action, phases.Exclude))
        return replace(state, lost=after.lost, owed=state.owed.without(event.node)), excludes
    return after, actions


def never_admits_a_block(state, event, program):
    after, actions = phases.step(state, event, program)
    kept = tuple(a for a in actions if not isinstance(a, phases.Admit) or a.node == 3)
    back = frozenset(a.node for a in actions if isinstance(a, phases.Admit) and a.node != 3)
    return replace(after, lost=after.lost | back), kept


@pytest.mark.parametrize(
    "wrong", [loses_a_node_alone, admits_a_part, waits_for_the_rest, never_admits_a_block]
)
def test_a_planted_mistake_about_blocks_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        is_about_losses = wrong is waits_for_the_rest
        ends = walk(wrong, SPANNING, lose_left=is_about_losses, join_left=2 - is_about_losses, stop_left=0)
        assert any(w.lives[1] > 1 and w.lives[2] > 1 and not w.lost for w in ends if w.end)
