"""Who holds what: never two on a slab, and every role somewhere."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from yatt.config.check import broken_relations
from yatt.config.schema import (
    DataSection,
    GenRMSection,
    LaunchSection,
    ModelSection,
    OptimizerSection,
    PlacementSection,
    RewardSection,
    RunConfig,
    RunSection,
    TrainerSection,
)  # fmt: skip
from yatt.core.gpus.placement import ROLLOUT, TRAINER, placement_of


def config(nodes: int, gpus: int, genrms: int, slabs: int) -> RunConfig:
    return RunConfig(
        run=RunSection(dir="/r"),
        data=DataSection(train_files=("a",)),
        model=ModelSection(path="/m"),
        optimizer=OptimizerSection(lr=1e-6),
        trainer=TrainerSection(total_iterations=1, train_batch_size=1, mini_batch_size=1),
        launch=LaunchSection(nodes=nodes, gpus_per_node=gpus),
        genrms=tuple(GenRMSection(name=f"g{i}", model="/g", template="{prompt}") for i in range(genrms)),
        placement=PlacementSection(mode="partial" if slabs else "colocated", genrm_gpu_sets=slabs),
    )


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(0, 6))
def test_every_slab_has_one_holder_a_phase_and_every_role_a_slab(
    nodes: int, gpus: int, genrms: int, slabs: int
) -> None:
    wanted = config(nodes, gpus, genrms, slabs)
    if broken_relations(wanted):
        return
    placement = placement_of(wanted)
    gpus_of = [(slab.node, gpu) for slab in placement.slabs for gpu in slab.gpus]
    assert sorted(gpus_of) == [(n, g) for n in range(nodes) for g in range(gpus)], "each GPU in one slab"
    for holders in (placement.sampling, *placement.scoring, placement.training):
        assert set(holders) == set(placement.slabs)
    assert set(placement.training.values()) == {TRAINER}
    engines = {*placement.sampling.values(), *(r for phase in placement.scoring for r in phase.values())}
    assert engines == {ROLLOUT, *(f"genrm:g{i}" for i in range(genrms))}


def disaggregated(
    nodes: int, trainer_nodes: int, gpus: int, *, engine_gpus: int = 0, genrms: int = 0, slabs: int = 0
) -> RunConfig:
    return replace(
        config(nodes, gpus, genrms, 0),
        launch=LaunchSection(nodes=nodes, gpus_per_node=gpus, engine_gpus_per_node=engine_gpus),
        placement=PlacementSection(mode="disaggregated", trainer_nodes=trainer_nodes, genrm_gpu_sets=slabs),
        rewards=(RewardSection(name="r", path="builtin:exact"),),
    )


@given(
    st.integers(1, 6), st.integers(0, 6), st.sampled_from([1, 2, 3, 4]), st.sampled_from([0, 1, 2, 8]),
    st.integers(0, 3), st.integers(0, 6),
)  # fmt: skip
def test_disaggregated_nobody_hands_anything_over(
    nodes: int, trainer_nodes: int, gpus: int, engine_gpus: int, genrms: int, slabs: int
) -> None:
    wanted = disaggregated(nodes, trainer_nodes, gpus, engine_gpus=engine_gpus, genrms=genrms, slabs=slabs)
    if broken_relations(wanted):
        return
    placement = placement_of(wanted)
    each = [gpus if node < trainer_nodes else engine_gpus or gpus for node in range(nodes)]
    gpus_of = [(slab.node, gpu) for slab in placement.slabs for gpu in slab.gpus]
    assert sorted(gpus_of) == [(n, g) for n, count in enumerate(each) for g in range(count)]
    assert placement.sampling == placement.training
    assert not placement.scoring
    for slab, role in placement.training.items():
        assert (role == TRAINER) == (slab.node < trainer_nodes)
    assert placement.trainer_nodes == tuple(range(trainer_nodes))
    assert placement.world_size == trainer_nodes * gpus
    ranks = [placement.first_rank(n) + gpu for n in placement.trainer_nodes for gpu in range(gpus)]
    assert ranks == list(range(placement.world_size))
    assert [placement.node_of(rank) for rank in ranks] == [
        n for n in placement.trainer_nodes for _ in range(gpus)
    ]
    assert placement.pools.keys() == {ROLLOUT, *(f"genrm:g{i}" for i in range(genrms))}
    judged = [s for s, role in sorted(placement.sampling.items()) if role.startswith("genrm")]
    assert len(judged) == slabs
    assert set(placement.slabs[len(placement.slabs) - slabs :]) == set(judged), "the last ones"
    takers = sorted(placement.pools[ROLLOUT])
    loads = Counter(rank for node in takers for rank in placement.weight_ranks(node, 1, 1))
    assert sum(loads.values()) == len(takers)
    assert max(loads.values()) - min(loads[rank] for rank in range(placement.world_size)) <= 1, "dealt evenly"


def test_where_slabs_change_hands_every_node_owns_prompts_and_none_fetches_weights() -> None:
    for slabs in (0, 1):
        placement = placement_of(config(3, 2, 1, slabs))
        assert placement.trainer_nodes == (0, 1, 2)
        assert placement.world_size == 6
        for node in range(3):
            (rank,) = placement.weight_ranks(node, 1, 1)
            assert placement.node_of(rank) == node


@pytest.mark.parametrize("mode", ["partial", "disaggregated"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (8, 1)])
def test_a_node_reads_each_part_of_the_model_from_one_rank_if_possible_its_own(mode, tp, pp) -> None:
    made = config(4, 4, 1, 1) if mode == "partial" else disaggregated(6, 2, 4)
    placement = placement_of(made)
    dp = placement.world_size // (tp * pp)
    for node in sorted(placement.pools[ROLLOUT]):
        ranks = placement.weight_ranks(node, tp, pp)
        parts = [(rank // (tp * dp), rank % tp) for rank in ranks]
        assert parts == [(p, t) for p in range(pp) for t in range(tp)], "each part once"
        for rank in ranks:
            having = [
                other for other in range(placement.world_size)
                if (other // (tp * dp), other % tp) == (rank // (tp * dp), rank % tp)
            ]  # fmt: skip
            local = [other for other in having if placement.node_of(other) == node]
            assert not local or rank in local


@pytest.mark.parametrize("mode", ["partial", "disaggregated"])
@pytest.mark.parametrize(
    ("tp", "expert_tp", "ep", "pp"), [(1, 1, 2, 1), (2, 1, 4, 1), (2, 1, 4, 2), (4, 2, 2, 2), (2, 2, 4, 1)]
)
def test_a_node_reads_every_expert(mode, tp, expert_tp, ep, pp) -> None:
    made = config(4, 4, 1, 1) if mode == "partial" else disaggregated(6, 2, 4)
    placement = placement_of(made)
    each = placement.world_size // pp
    layout = replace(
        made.trainer, tensor_model_parallel_size=tp, expert_tensor_parallel_size=expert_tp,
        expert_model_parallel_size=ep,
    )  # fmt: skip
    for node in sorted(placement.pools[ROLLOUT]):
        places = [divmod(rank, each) for rank in placement.weight_ranks(node, layout.whole_stage, pp)]
        assert {(stage, at % tp) for stage, at in places} == {(p, t) for p in range(pp) for t in range(tp)}
        experts = {(stage, at % expert_tp, at // expert_tp % ep) for stage, at in places}
        assert len(experts) == pp * expert_tp * ep, "as in megatron-core's order tp-cp-ep-dp-pp of experts"


def test_an_engine_need_not_fit_a_node_that_only_trains() -> None:
    wanted = disaggregated(2, 1, 3, engine_gpus=4)
    wanted = replace(wanted, rollout=replace(wanted.rollout, tp_size=2))
    assert not broken_relations(wanted)
    assert [slab.gpus for slab in placement_of(wanted).slabs] == [(0, 1, 2), (0, 1), (2, 3)]


def test_the_split_counts_from_the_last_node() -> None:
    placement = placement_of(config(2, 2, 1, 1))
    assert [role for _, role in sorted(placement.sampling.items())] == [ROLLOUT] * 3 + ["genrm:g0"]


def widths(wanted: RunConfig, rollout: int, *genrms: int) -> RunConfig:
    """The config with these numbers of GPUs per engine."""
    sections = tuple(replace(g, tp_size=size) for g, size in zip(wanted.genrms, genrms, strict=True))
    return replace(wanted, rollout=replace(wanted.rollout, tp_size=rollout), genrms=sections)


def test_an_engine_of_two_gpus_makes_slabs_of_two() -> None:
    placement = placement_of(widths(config(1, 4, 1, 0), 2, 1))
    assert [slab.gpus for slab in placement.slabs] == [(0, 1), (2, 3)]
    assert [placement.engines_on(slab, ROLLOUT) for slab in placement.slabs] == [((0, 1),), ((2, 3),)]
    assert [placement.engines_on(slab, "genrm:g0") for slab in placement.slabs] == [
        ((0,), (1,)),
        ((2,), (3,)),
    ]


SIZES = st.sampled_from([1, 2, 4, 8])


@given(st.integers(1, 3), SIZES, SIZES, st.tuples(SIZES, SIZES), st.integers(0, 4))
def test_engines_side_by_side_fill_every_slab_and_have_no_gpu_in_common(
    nodes: int, gpus: int, rollout: int, genrms: tuple[int, int], slabs: int
) -> None:
    wanted = widths(config(nodes, gpus, 2, slabs), rollout, *genrms)
    if broken_relations(wanted) or max(rollout, *genrms) > gpus:
        return
    placement = placement_of(wanted)
    sizes = {ROLLOUT: rollout, "genrm:g0": genrms[0], "genrm:g1": genrms[1]}
    counts: dict[str, Counter[int]] = {role: Counter() for role in sizes}
    for slab in placement.slabs:
        for role in set(placement.roles_of(slab)) - {TRAINER}:
            engines = placement.engines_on(slab, role)
            assert [gpu for own in engines for gpu in own] == list(slab.gpus), "in order, each GPU once"
            assert {len(own) for own in engines} == {sizes[role]}
            assert placement.num_engines_on(slab)[role] == len(engines)
            counts[role][slab.node] += len(engines)
    assert placement.num_engines == counts


@given(
    st.integers(1, 8),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 2),
    st.integers(0, 8),
    st.sampled_from(["colocated", "partial", "disaggregated"]),
)
def test_an_engine_over_nodes_has_one_role_on_all_of_them_and_each_gpu_one_rank(
    nodes: int, gpus: int, rollout: int, judge: int, genrms: int, slabs: int, mode: str
) -> None:
    wanted = config(nodes, gpus, genrms, 0)
    wanted = replace(
        wanted, rollout=replace(wanted.rollout, tp_size=rollout),
        genrms=tuple(replace(each, tp_size=judge) for each in wanted.genrms),
        placement=PlacementSection(
            mode=mode, genrm_gpu_sets=slabs, trainer_nodes=1 if mode == "disaggregated" else 0  # type: ignore[arg-type]
        ),
    )  # fmt: skip
    if broken_relations(wanted) or max(rollout, judge) <= gpus:
        return
    placement = placement_of(wanted)
    for holders in (placement.sampling, *placement.scoring):
        for slab, role in holders.items():
            if role == TRAINER:
                continue
            mates = placement.nodes_of(slab, role)
            assert slab.node in mates and len(mates) == placement.spans[role]
            assert {holders[each] for each in placement.slabs if each.node in mates} == {role}
            whole = [g for node in mates for s in placement.slabs_by_node[node]
                     for engine in placement.engines_on(s, role) for g in engine]  # fmt: skip
            if len(mates) > 1:
                assert len(whole) == placement.engine_gpus[role], "one process for each of its GPUs"
            widest = max(placement.spans[each] for each in placement.roles_of(slab) if each != TRAINER)
            assert set(mates) <= placement.with_blocks({slab.node})
            assert len(placement.with_blocks({slab.node})) == widest, "no node is lost along for nothing"
    for role, counts in placement.num_engines.items():
        held = [
            s for holders in (placement.sampling, *placement.scoring) for s, r in holders.items() if r == role
        ]
        assert counts.total() * placement.engine_gpus[role] == sum(len(slab.gpus) for slab in set(held))


def test_nodes_whose_engines_are_all_narrow_are_in_no_block() -> None:
    wanted = widths(config(5, 1, 1, 2), 1, 2)
    placement = placement_of(
        replace(wanted, placement=replace(wanted.placement, mode="disaggregated", trainer_nodes=1))
    )
    assert placement.pools == {ROLLOUT: {1, 2}, "genrm:g0": {3, 4}}
    assert placement.blocks == ({3, 4},)
    assert placement.with_blocks({1}) == {1} and placement.with_blocks({3}) == {3, 4}
