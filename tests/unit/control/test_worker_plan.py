"""The planned workers of a node: names, GPUs and order of engines that share a slab."""

from pathlib import Path

from tests.unit.core.test_placement import config, disaggregated, widths
from yatt.config.schema import RunConfig
from yatt.control.gpus.processes.worker_plan import planned_workers
from yatt.control.node import Node
from yatt.core.gpus.placement import TRAINER, placement_of
from yatt.paths import RunPaths


def engines(wanted: RunConfig, index: int = 0) -> dict[str, tuple[int, ...]]:
    node = Node(
        config=wanted, paths=RunPaths(Path("/r")), placement=placement_of(wanted),
        attempt=1, index=index, host="",
        device="cpu",
    )  # fmt: skip
    workers = planned_workers(node)
    assert len({worker.name for worker in workers}) == len(workers)
    return {w.name: w.gpus for w in workers if w.slab is not None and w.role != TRAINER}


def test_one_engine_has_the_name_and_the_gpus_of_its_slab() -> None:
    assert engines(widths(config(1, 4, 1, 0), 2, 2)) == {
        "rollout-n0s0": (0, 1), "genrm-g0-n0s0": (0, 1), "rollout-n0s1": (2, 3), "genrm-g0-n0s1": (2, 3),
    }  # fmt: skip


def test_engines_side_by_side_have_numbers_and_gpus_of_their_own() -> None:
    assert engines(widths(config(1, 4, 1, 0), 1, 4)) == {
        **{f"rollout-n0s0e{gpu}": (gpu,) for gpu in range(4)}, "genrm-g0-n0s0": (0, 1, 2, 3),
    }  # fmt: skip


def test_of_two_genrms_the_narrow_one_has_several_engines() -> None:
    wanted = widths(disaggregated(2, 1, 1, engine_gpus=12, genrms=2, slabs=2), 2, 4, 2)
    assert engines(wanted, 1) == {
        "rollout-n1s0e0": (0, 1), "rollout-n1s0e1": (2, 3),
        "genrm-g0-n1s1": (4, 5, 6, 7),
        "genrm-g1-n1s2e0": (8, 9), "genrm-g1-n1s2e1": (10, 11),
    }  # fmt: skip
