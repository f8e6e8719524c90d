"""Profiles of a rank: what is in them, and that their faults cost nothing else."""

import gzip
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from yatt.config.sections.profile import ProfileSection
from yatt.trainer.update.profile import ProfileFiles, RankProfiler, recorded_micro_batches

SECTION = ProfileSection(kinds=("torch",), iterations=(2, 4))
NUM_TICKS, RECORDED = 5, 2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("run", "scratch"):
        (tmp_path / name).mkdir()
    return tmp_path


def profiler(
    root: Path, section: ProfileSection = SECTION, num_micro_batches: int = RECORDED
) -> RankProfiler:
    files = ProfileFiles(root / "run", root / "run" / "attempts" / "1" / "profiles", rank=3)
    return RankProfiler(
        section,
        torch.device("cpu"),
        num_micro_batches=num_micro_batches,
        files=files,
        scratch=root / "scratch",
    )


def update(made: RankProfiler, iteration: int) -> int:
    """An update in which each micro-batch is one product; returns the number of calls of its tick."""
    ticks = []
    with made.of_iteration(iteration):
        factor = torch.ones(4, 4)
        factor @ factor  # the passes before the update
        tick = made.before_last(lambda: ticks.append(1), NUM_TICKS)
        for _ in range(NUM_TICKS):
            tick()
            factor @ factor
    return len(ticks)


def written(root: Path) -> dict[str, list[str]]:
    """Names of events, by the trace's name."""
    return {
        path.name: [event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        for path in (root / "run").rglob("*.gz")
    }


def test_a_trace_has_the_last_micro_batches_of_the_chosen_iterations(root: Path) -> None:
    made = profiler(root)
    assert [update(made, iteration) for iteration in range(1, 6)] == [NUM_TICKS] * 5
    made.close()
    found = written(root)
    assert set(found) == {f"iteration{iteration}-rank3.trace.json.gz" for iteration in (2, 4)}
    assert all(Counter(names)["aten::mm"] == RECORDED for names in found.values())
    assert not any((root / "scratch").iterdir())


def test_a_trace_may_have_every_micro_batch(root: Path) -> None:
    made = profiler(root, num_micro_batches=100)
    update(made, 2)
    made.close()
    (names,) = written(root).values()
    assert Counter(names)["aten::mm"] == NUM_TICKS


@pytest.mark.parametrize("lost", ["scratch", "run"])
def test_a_folder_that_is_gone_costs_only_the_profiles(root: Path, lost: str, caplog) -> None:
    made = profiler(root)
    shutil.rmtree(root / lost)
    assert [update(made, iteration) for iteration in (2, 3, 4)] == [NUM_TICKS] * 3
    made.close()
    assert written(root) == {}
    assert any(record.exc_info for record in caplog.records), "the log says why"


def test_an_error_of_the_update_is_not_hidden_and_ends_the_trace(root: Path) -> None:
    made = profiler(root)

    def fail() -> None:
        raise FloatingPointError("gradient")

    with pytest.raises(FloatingPointError, match="gradient"), made.of_iteration(2):
        made.before_last(fail, 1)()
    assert update(made, 4) == NUM_TICKS
    made.close()
    assert len(written(root)) == 2


def test_what_needs_cuda_is_left_out_without_it(root: Path, caplog) -> None:
    made = profiler(root, replace(SECTION, kinds=("memory", "nvtx")))
    assert update(made, 2) == NUM_TICKS
    made.close()
    assert written(root) == {} and caplog.text.count("it needs CUDA") == 2


def test_a_trace_that_would_cost_the_lease_is_not_made(root: Path, caplog) -> None:
    made = profiler(root, num_micro_batches=0)
    assert update(made, 2) == NUM_TICKS
    made.close()
    assert written(root) == {} and "lease.ttl_s" in caplog.text


def test_the_end_of_a_trace_leaves_time_to_renew_the_lease() -> None:
    def allowed(wanted: int, num_modules: int, ttl_s: float) -> int:
        return recorded_micro_batches(wanted, num_modules=num_modules, ttl_s=ttl_s)

    assert allowed(2, 14 * 32, 10.0) == 2
    assert allowed(9, 14 * 32, 10.0) == 3, "half of ten seconds, at 100,000 events a second"
    assert allowed(9, 14 * 32, 20.0) == 7
    assert allowed(9, 14 * 32 * 20, 10.0) == 0


def test_without_kinds_nothing_is_wrapped(root: Path) -> None:
    made = profiler(root, ProfileSection())

    def tick() -> None:
        pass

    with made.of_iteration(1):
        assert made.before_last(tick, 9) is tick
