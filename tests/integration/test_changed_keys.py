"""A finished run that continues with more iterations, and other keys that change when a run is resumed."""

import json
import subprocess
import sys
from pathlib import Path

from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, environment, rows, yatt


def test_a_finished_run_continues_as_if_it_had_been_longer_from_the_start(tmp_path: Path) -> None:
    whole = RunFile(tmp_path / "whole")
    done = yatt("run", str(whole.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    short = RunFile(tmp_path / "short", {"trainer": {"total_iterations": 2}})
    assert yatt("run", str(short.write())).returncode == 0
    again = yatt("resume", str(short.run_dir))
    assert again.returncode == 0 and "finished" in again.stdout + again.stderr
    refused = yatt("resume", str(short.run_dir), "trainer.total_iterations=4", "optimizer.lr=0.5")
    assert refused.returncode == 2 and "optimizer.lr: was 0.001, is 0.5 (it decides what is" in refused.stderr
    too_few = yatt("resume", str(short.run_dir), "trainer.total_iterations=1")
    assert too_few.returncode == 2 and "iteration 2 is saved already" in too_few.stderr
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


def test_the_results_of_a_validation_stay_when_a_later_start_does_not_validate(tmp_path: Path) -> None:
    validation = {"reward": "digits", "every": 2, "max_prompts": 4}
    run = RunFile(tmp_path, {"trainer": {"total_iterations": 2}, "validation": validation})
    run.settings["data"] = {"val_files": [str(tmp_path / "train.jsonl")]}
    assert yatt("run", str(run.write())).returncode == 0
    before = {row["training/global_step"]: row for row in rows(run.run_dir / "metrics.jsonl")}
    keys = [key for key in before[2] if key.startswith("val-core/")]
    assert keys
    done = yatt("resume", str(run.run_dir), "trainer.total_iterations=4", "validation.every=0")
    assert done.returncode == 0, done.stdout + done.stderr
    after = {row["training/global_step"]: row for row in rows(run.run_dir / "metrics.jsonl")}
    assert [after[2][key] for key in keys] == [before[2][key] for key in keys]
    assert all(key in after[4] for key in keys) and keys[0] not in after[3]


PROGRAM = """
import signal, sys, threading, yatt
config = yatt.load_config(sys.argv[1])
before = signal.getsignal(signal.SIGINT)
assert yatt.run(config) == 0
assert signal.getsignal(signal.SIGINT) is before
assert yatt.run(config) == 0, "it is finished"
told = []
def other():
    try:
        yatt.run(config)
    except yatt.errors.ConfigError as error:
        told.append(str(error))
thread = threading.Thread(target=other)
thread.start()
thread.join()
assert "main thread" in told[0], told
"""


def test_a_program_may_run_twice_and_has_its_signals_back(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"trainer": {"total_iterations": 1}})
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    argv = [sys.executable, str(program), str(run.write())]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
