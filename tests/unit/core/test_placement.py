"""Who holds what: never two on a slab, and every role somewhere."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from yatt.config.check import relations
from yatt.config.schema import (
    DataSection,
    GenRMSection,
    LaunchSection,
    ModelSection,
    OptimizerSection,
    PlacementSection,
    RunConfig,
    RunSection,
    TrainerSection,
)  # fmt: skip
from yatt.core.placement import ROLLOUT, TRAINER, place


def config(nodes: int, gpus: int, genrms: int, slabs: int) -> RunConfig:
    return RunConfig(
        run=RunSection(dir="/r"),
        data=DataSection(train_files=("a",)),
        model=ModelSection(path="/m"),
        optimizer=OptimizerSection(lr=1e-6),
        trainer=TrainerSection(total_iterations=1, train_batch_size=1, mini_batch_size=1),
        launch=LaunchSection(nodes=nodes, gpus_per_node=gpus),
        genrms=tuple(GenRMSection(name=f"g{i}", model="/g", template="{prompt}") for i in range(genrms)),
        placement=PlacementSection(mode="partial" if slabs else "colocated", genrm_slabs=slabs),
    )


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(0, 6))
def test_every_slab_has_one_holder_a_phase_and_every_role_a_slab(
    nodes: int, gpus: int, genrms: int, slabs: int
) -> None:
    wanted = config(nodes, gpus, genrms, slabs)
    if relations(wanted):
        return
    placement = place(wanted)
    gpus_of = [(slab.node, gpu) for slab in placement.slabs for gpu in slab.gpus]
    assert sorted(gpus_of) == [(n, g) for n in range(nodes) for g in range(gpus)], "each GPU in one slab"
    for holders in (placement.sampling, *placement.scoring, placement.training):
        assert set(holders) == set(placement.slabs)
    assert set(placement.training.values()) == {TRAINER}
    engines = {*placement.sampling.values(), *(r for phase in placement.scoring for r in phase.values())}
    assert engines == {ROLLOUT, *(f"genrm:g{i}" for i in range(genrms))}


def test_the_split_counts_from_the_last_node() -> None:
    placement = place(config(2, 2, 1, 1))
    assert [role for _, role in sorted(placement.sampling.items())] == [ROLLOUT] * 3 + ["genrm:g0"]


def test_an_engine_of_two_gpus_makes_slabs_of_two() -> None:
    wanted = config(1, 4, 1, 0)
    wanted = replace(wanted, rollout=replace(wanted.rollout, tp_size=2))
    assert [slab.gpus for slab in place(wanted).slabs] == [(0, 1), (2, 3)]
