"""Training files that are others after a pause: no completion is scored against another row's truth."""

import json
import signal
from pathlib import Path

import pytest

from tests.runs import RunFile, rows, start, wait_for, yatt

pytestmark = pytest.mark.faults


def test_changed_training_files_are_refused_and_the_old_ones_go_on(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"launch": {"nodes": 1}, "trainer": {"total_iterations": 500}})
    config = str(run.write())
    data = run.folder / "train.jsonl"
    process = start("run", config)
    try:
        wait_for(lambda: rows(run.run_dir / "metrics.jsonl"), timeout_s=120, what="an iteration")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 75, said
    old = data.read_bytes()
    data.write_bytes(json.dumps({"prompt": "prompt 999 is"}).encode() + b"\n" + old)
    refused = yatt("resume", str(run.run_dir))
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "data.train_files: the files are not what they were" in refused.stdout + refused.stderr
    data.write_bytes(old)
    going = start("resume", str(run.run_dir))
    try:
        events = run.run_dir / "events.jsonl"
        wait_for(
            lambda: [e for e in rows(events) if (e["attempt"], e.get("phase")) == (3, "train")],
            timeout_s=120,
            what="an iteration of the third attempt",
        )
        going.send_signal(signal.SIGINT)
        said, _ = going.communicate(timeout=300)
    finally:
        going.kill()
    assert going.returncode == 75, said
