"""The scripts that make figures on a GPU run to their end at toy size, on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]


def figures(script: str, folder: Path) -> list[dict]:
    argv = [sys.executable, "-W", "ignore", "-m", f"tests.gpu.{script}", "--toy", "--out", str(folder)]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    name = script.removeprefix("bench_")
    return json.loads((folder / f"{name}.json").read_text())["rows"]


def test_parity_of_every_family(tmp_path: Path) -> None:
    rows = figures("parity", tmp_path)
    assert len(rows) == 6
    assert all(0 < row["float32_most"] < 1e-5 for row in rows), rows


def test_the_trainers_steps_are_the_same_with_either_head_and_recomputed_or_not(tmp_path: Path) -> None:
    rows = figures("bench_trainer", tmp_path)
    steps = [row for row in rows if "grad_norm" in row]
    assert len(steps) == 4 and len({round(row["grad_norm"], 4) for row in steps}) == 1, steps
    assert all(row["tokens_per_s"] > 0 for row in steps)
    assert rows[-1]["by_length_s"] > 0


def test_an_engine_sleeps_wakes_and_takes_weights(tmp_path: Path) -> None:
    (row,) = figures("bench_engine", tmp_path)
    assert row["compared"] > 0 and row["differing"] == []
    assert row["logprob_difference_mean"] < 1e-4
    assert row["tokens_per_s"] > 0 and row["update_gb_per_s"] > 0


def test_a_colocated_run_loses_an_engine_and_no_attempt(tmp_path: Path) -> None:
    (row,) = figures("colocated", tmp_path)
    assert row["lease.grant"] > 6 and row["weights.check"] > 6
    assert row["difference_of_allowed"] < 1


def test_a_trace_is_written(tmp_path: Path) -> None:
    assert figures("trace", tmp_path)[0]["ms"] > 0
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
