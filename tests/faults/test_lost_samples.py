"""Requests whose engines or processes end again and again: what is lost, and when an attempt begins anew."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, kill, living, rows, start, wait_for, yatt
from yatt.control.gpus.workers import MOST_DEATHS
from yatt.control.rollouts.scoring.reward_pool import PATIENCE

pytestmark = pytest.mark.faults

HELD_UP = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if os.path.exists({mark!r}):
        with open({mark!r} + ".pid", "w") as file:
            file.write(str(os.getpid()))
    while os.path.exists({mark!r}):
        time.sleep(0.01)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


def run_file(folder: Path, **settings: Any) -> RunFile:
    run = RunFile(folder, {"trainer": {"total_iterations": 2}, **settings})
    run.write()
    (folder / "policy" / "scripted.json").write_text(json.dumps({"steps_per_token": 2000}))
    (folder / "reward.py").write_text(HELD_UP.format(mark=str(folder / "mark")))
    return run


def events(run: RunFile, kind: str) -> list[dict[str, Any]]:
    return [event for event in rows(run.run_dir / "events.jsonl") if event["kind"] == kind]


def pids(run: RunFile, module: str) -> list[int]:
    return [pid for pid, name in living(run.run_dir).items() if name == module]


def finish(process: "subprocess.Popen[str]") -> str:
    try:
        output, _ = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, output
    return output


def check_as_undisturbed(folder: Path, disturbed: RunFile, **settings: Any) -> None:
    calm = run_file(folder, **settings)
    assert (done := yatt("run", str(calm.write()))).returncode == 0, done.stdout
    assert len(events(disturbed, "attempt.start")) == 2 * len(events(calm, "attempt.start"))
    assert not events(disturbed, "rollout.group.drop")
    assert metrics(disturbed) == metrics(calm)
    assert final_state(disturbed) == final_state(calm)


def test_a_request_that_is_lost_for_good_ends_the_attempt_and_changes_no_result(tmp_path: Path) -> None:
    settings = {"rollout": {"max_retries": 0}}
    run = run_file(tmp_path / "killed", **settings)
    process = start("run", str(run.write()))
    wait_for(lambda: events(run, "rollout.group.open"), timeout_s=60, what="completions to be sampled")
    assert kill(pids(run, "yatt.rollout")[0])
    assert "a lost sample would change the results" in finish(process)
    check_as_undisturbed(tmp_path / "calm", run, **settings)


def test_a_call_whose_process_is_killed_each_time_ends_the_attempt_and_changes_no_result(
    tmp_path: Path,
) -> None:
    run = run_file(tmp_path / "killed", launch={"nodes": 1})
    (mark := tmp_path / "killed" / "mark").touch()
    process = start("run", str(run.write()))
    wait_for(lambda: events(run, "rollout.group.open"), timeout_s=60, what="completions to be scored")
    in_call = mark.with_suffix(".pid")
    for _ in range(PATIENCE + 1):
        wait_for(in_call.exists, timeout_s=60, what="a call to be under way")
        wait_for(in_call.read_text, timeout_s=60, what="its process's number")
        pid = int(in_call.read_text())
        in_call.unlink()
        assert kill(pid)
    mark.unlink()
    assert "a lost sample would change the results" in finish(process)
    check_as_undisturbed(tmp_path / "calm", run, launch={"nodes": 1})


def test_an_engine_that_only_dies_ends_the_attempt_instead_of_being_started_for_ever(tmp_path: Path) -> None:
    settings = {"run": {"deterministic": False}, "launch": {"nodes": 1}, "rollout": {"max_retries": 1000}}
    run = run_file(tmp_path, **settings)
    (tmp_path / "policy" / "scripted.json").write_text(json.dumps({"steps_per_token": 20000}))
    process = start("run", str(run.write()))
    for number in range(1, MOST_DEATHS + 1):
        wire = f"rollout-n0s0.{number}"

        def is_up(wire: str = wire) -> bool:
            return any(event["worker"] == wire for event in events(run, "weights.check"))

        wait_for(is_up, timeout_s=60, what=f"{wire} to be up")
        kill(pids(run, "yatt.rollout")[0])
    troubles = wait_for(lambda: events(run, "failure.report"), timeout_s=60, what="the end of the attempt")
    (tmp_path / "policy" / "scripted.json").write_text(json.dumps({"steps_per_token": 1}))
    assert f"ended {MOST_DEATHS} times in a row, and completed nothing meanwhile" in finish(process)
    assert troubles[0]["exit_code"] == 1
    assert [row["training/global_step"] for row in rows(run.run_dir / "metrics.jsonl")] == [1, 2]
