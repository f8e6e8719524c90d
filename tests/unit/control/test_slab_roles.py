"""Roles of slabs by phase: answers are kept, and never older than the table."""

from collections.abc import Mapping
from dataclasses import replace

from tests.unit.core.test_placement import config, disaggregated
from yatt.control.leader.slabs.slab_table import SlabTable
from yatt.core.gpus.moves import MoveRules, Moves
from yatt.core.gpus.placement import Placement, Slab, placement_of
from yatt.core.phases.phases import Phase

JUDGE = "genrm:judge"


def table_of(placement: Placement, roles: Mapping[Slab, str]) -> SlabTable:
    table = SlabTable(placement, MoveRules(least={}, most={}))
    table.moves = Moves(table=roles)
    return table


def test_a_node_is_asked_for_what_the_phase_and_the_table_say() -> None:
    placement = placement_of(disaggregated(3, 1, 1))
    slab, *_ = placement.slabs_by_node[2]
    table = table_of(placement, {slab: "rollout"})
    for phase in (Phase.ROLLOUT, Phase.TRAIN):
        whole = table.holders(phase, 0)
        assert dict(table.holders_on(2, phase))[slab.index] == "rollout" == whole[slab]
    former, table.moves = table.moves, Moves(table={slab: JUDGE})
    for phase in (Phase.ROLLOUT, Phase.TRAIN):
        assert dict(table.holders_on(2, phase))[slab.index] == JUDGE
    table.moves = former
    assert dict(table.holders_on(2, Phase.TRAIN))[slab.index] == "rollout"


def test_a_scoring_phase_gives_every_slab_to_its_genrm_whatever_the_table_says() -> None:
    partial = config(1, 4, 1, 1)
    section = replace(partial.placement, split="dynamic")
    placement = placement_of(replace(partial, placement=section))
    table = table_of(placement, dict.fromkeys(placement.slabs, "rollout"))
    assert [set(turn.values()) for turn in placement.turns] == [{"genrm:g0"}] and not placement.scoring
    assert {role for _, role in table.holders_on(0, Phase.ROLLOUT, 0)} == {"rollout"}
    assert {role for _, role in table.holders_on(0, Phase.SCORE, 0)} == {"genrm:g0"}
    assert set(table.holders(Phase.SCORE, 0).values()) == {"genrm:g0"}
    assert {role for _, role in table.holders_on(0, Phase.SYNC, 0)} == {"rollout"}
    assert not placement_of(disaggregated(3, 1, 1)).turns


def test_the_trainers_phases_give_it_its_slabs_whatever_the_table_says() -> None:
    placement = placement_of(config(1, 2, 1, 2))
    slab, *_ = placement.slabs
    table = table_of(placement, {slab: JUDGE})
    assert dict(table.holders_on(0, Phase.ROLLOUT, 0))[slab.index] == JUDGE
    assert dict(table.holders_on(0, Phase.TRAIN, 0))[slab.index] == "trainer"
    assert table.holders(Phase.TRAIN, 0)[slab] == "trainer"
