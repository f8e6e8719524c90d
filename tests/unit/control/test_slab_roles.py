"""Roles of slabs by phase: answers are kept, and never older than the table."""

from tests.unit.core.test_placement import config, disaggregated
from yatt.control.leader.slabs.slabs import SlabRoles
from yatt.core.gpus.placement import placement_of
from yatt.core.phases.phases import Phase

JUDGE = "genrm:judge"


def test_a_node_is_asked_for_what_the_phase_and_the_table_say() -> None:
    placement = placement_of(disaggregated(3, 1, 1))
    roles, (slab, *_) = SlabRoles(placement), placement.slabs_by_node[2]
    table = {slab: "rollout"}
    for phase in (Phase.ROLLOUT, Phase.TRAIN):
        whole = roles.holders(phase, 0, table)
        assert dict(roles.holders_on(2, phase, 0, table))[slab.index] == "rollout" == whole[slab]
    moved = {slab: JUDGE}
    for phase in (Phase.ROLLOUT, Phase.TRAIN):
        assert dict(roles.holders_on(2, phase, 0, moved))[slab.index] == JUDGE
    assert dict(roles.holders_on(2, Phase.TRAIN, 0, table))[slab.index] == "rollout"


def test_the_trainers_phases_give_it_its_slabs_whatever_the_table_says() -> None:
    placement = placement_of(config(1, 2, 1, 2))
    roles, (slab, *_) = SlabRoles(placement), placement.slabs
    table = {slab: JUDGE}
    assert dict(roles.holders_on(0, Phase.ROLLOUT, 0, table))[slab.index] == JUDGE
    assert dict(roles.holders_on(0, Phase.TRAIN, 0, table))[slab.index] == "trainer"
    assert roles.holders(Phase.TRAIN, 0, table)[slab] == "trainer"
