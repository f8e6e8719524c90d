"""Whole runs whose workers are forked: results to the bit, and nurseries that are killed or stand still."""

import contextlib
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, kill, living, rows, start, wait_for, yatt

pytestmark = [pytest.mark.faults, pytest.mark.slow]
NURSERY = "yatt.adapters.processes.nursery"


def run_file(folder: Path, **launch: Any) -> RunFile:
    """Two ranks of one model, an engine a slot, and two reward processes, on one node."""
    return RunFile(folder, {
        "launch": {"nodes": 1, "gpus_per_node": 2, "reward_processes": 2, **launch},
        "trainer": {"tensor_model_parallel_size": 2, "total_iterations": 24},
    })  # fmt: skip


def events(run: RunFile, kind: str) -> list[dict[str, Any]]:
    return [event for event in rows(run.run_dir / "events.jsonl") if event["kind"] == kind]


def starts(run: RunFile, name: str) -> list[bool]:
    """Whether each process of these workers was forked."""
    return [e["is_forked"] for e in events(run, "worker.start") if e["worker"].startswith(name)]


def nurseries(run: RunFile, kind: str) -> list[int]:
    """Pids of nurseries whose main process has this kind on its command line."""
    found = []
    for pid, module in living(run.run_dir).items():
        if module == NURSERY:
            with contextlib.suppress(OSError):  # the second process has become a worker, or ended
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found += [pid] if kind.encode() in words else []
    return found


def only(pids: list[int]) -> int:
    return pids[0] if len(pids) == 1 else 0


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> RunFile:
    """The reference: a run that forks nothing."""
    run = run_file(tmp_path_factory.mktemp("started") / "run", nurseries=False)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stderr
    assert not any(starts(run, "")) and not events(run, "nursery.ready")
    return run


def ended(run: RunFile, process: "subprocess.Popen[str]") -> str:
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert len(events(run, "attempt.start")) == 1
    assert not living(run.run_dir) and not run.leftovers()
    return out


def test_forked_workers_end_like_started_ones_and_a_nursery_that_is_killed_is_replaced(
    started, tmp_path
) -> None:
    """A whole run: the bits of real trainer ranks that were forked, and engines that are needed again."""
    run = run_file(tmp_path / "run")
    process = start("run", str(run.write()))
    wait_for(lambda: rows(run.run_dir / "metrics.jsonl"), timeout_s=120, what="an iteration")
    assert all(starts(run, "")) and len(starts(run, "trainer")) == 2
    assert not events(run, "nursery.end") and not events(run, "worker.delay")
    for number in (2, 3):
        # While it forks, there is a second process for an instant.
        pid = wait_for(lambda: only(nurseries(run, "scripted")), what="the nursery alone")
        assert kill(pid)
        wait_for(lambda: len(events(run, "nursery.end")) == number - 1, what="its end")  # noqa: B023
        engine = next(pid for pid, module in living(run.run_dir).items() if module == "yatt.rollout")
        assert kill(engine)
        ready = f"nursery-scripted-n0.{number}"
        wait_for(
            lambda: ready in {e["nursery"] for e in events(run, "nursery.ready")},  # noqa: B023
            timeout_s=60, what="the next nursery",
        )  # fmt: skip
    engine = next(pid for pid, module in living(run.run_dir).items() if module == "yatt.rollout")
    assert kill(engine)
    wait_for(lambda: len(starts(run, "rollout")) == 5, what="the next engine")
    ended(run, process)
    forked = starts(run, "rollout")  # those that were to begin while a nursery imported may have been started
    assert [*forked[:2], forked[-1]] == [True] * 3
    assert final_state(run) == final_state(started)
    assert metrics(run) == metrics(started)
    assert starts(run, "trainer") == [True] * 2
    assert [e["why"] for e in events(run, "nursery.end")] == ["it has ended"] * 2


def test_nurseries_that_stand_still_are_not_waited_for(started, tmp_path) -> None:
    run = run_file(tmp_path / "run")
    process = start("run", str(run.write()))
    for kind in ("trainer", "scripted"):
        (pid,) = wait_for(lambda: nurseries(run, kind), timeout_s=60, what="a nursery")  # noqa: B023
        assert kill(pid, signal.SIGSTOP)
    ended(run, process)
    assert not any(starts(run, "trainer"))
    assert {e["why"] for e in events(run, "nursery.end")} == {"it has stood still for 5 s while it imported"}
    assert final_state(run) == final_state(started)
