"""A finished run that continues with more iterations, and other keys that change when a run is resumed."""

import json
from pathlib import Path

import pytest

from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, rows, yatt

pytestmark = pytest.mark.timeout(600)


def test_a_finished_run_continues_as_if_it_had_been_longer_from_the_start(tmp_path: Path) -> None:
    whole = RunFile(tmp_path / "whole")
    done = yatt("run", str(whole.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    short = RunFile(tmp_path / "short", {"trainer": {"total_iterations": 2}})
    assert yatt("run", str(short.write())).returncode == 0
    again = yatt("resume", str(short.run_dir))
    assert again.returncode == 0 and "finished" in again.stdout + again.stderr
    refused = yatt("resume", str(short.run_dir), "trainer.total_iterations=4", "optimizer.lr=0.5")
    assert refused.returncode == 2 and "optimizer.lr: was 0.001, is 0.5 (it changes what is" in refused.stderr
    longer = yatt(
        "resume", str(short.run_dir), "trainer.total_iterations=4", "checkpoint.keep=3", "lease.ttl_s=33"
    )
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert "changed trainer.total_iterations: was 2, is 4" in longer.stdout
    assert final_state(short) == final_state(whole)
    assert metrics(short) == metrics(whole)
    manifests = list((short.run_dir / "checkpoints" / "manifests").glob("*.json"))
    assert len(manifests) == 3  # checkpoint.keep of the second attempt
    status = json.loads(yatt("status", str(short.run_dir), "--json").stdout)
    assert status["total_iterations"] == 4 and status["state"] == "finished"
    (changed,) = status["changes"]
    assert changed["after"] == 1 and "lease.ttl_s: was 10.0, is 33.0" in changed["words"]
    assert {row["attempt"] for row in rows(short.run_dir / "events.jsonl")} == {1, 2}
