"""A profile in a real run: the chosen rank and iteration, and the same results as without."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.runs import RunFile, rows, yatt
from yatt.obs.metrics import comparable_results

pytestmark = pytest.mark.slow


def finished(folder: Path, **settings: object) -> RunFile:
    run = RunFile(folder, {"trainer": {"total_iterations": 3}, **settings})
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def test_a_profiled_run_has_a_trace_and_the_same_results(tmp_path: Path) -> None:
    chosen = {"kinds": ["torch"], "iterations": [2], "ranks": [1]}
    profiled, plain = finished(tmp_path / "a", profile=chosen), finished(tmp_path / "b")
    (trace,) = profiled.run_dir.glob("attempts/*/profiles/*")
    assert trace.name == "iteration2-rank1.trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = Counter(event["name"] for event in events)
    assert names["aten::mm"] >= 2 * 2 * 4 * 3, "two micro-batches, two layers, four matrices, and backward"
    assert any(name.startswith("Optimizer.step") for name in names)
    assert not any(plain.run_dir.glob("attempts/*/profiles"))
    assert not profiled.leftovers()
    compared = [
        [comparable_results(row) for row in rows(run.run_dir / "metrics.jsonl")] for run in (profiled, plain)
    ]
    assert compared[0] == compared[1] and len(compared[0]) == 3
    weights = [
        {path.name: path.read_bytes() for path in (run.run_dir / "model").glob("*.safetensors")}
        for run in (profiled, plain)
    ]
    assert weights[0] == weights[1] and weights[0]
