"""An interpreter that stands still at its start, as on a shared filesystem: costs its worker, nobody else."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import children_of
from tests.faults.test_lost_samples import events, finish, pids
from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import HANG_S, RunFile, environment, kill, rows, wait_for, yatt
from tests.standing_still import interpreter_that_stands_still, put_interpreter
from tests.unit.core.test_placement import config
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.node import Node
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths

pytestmark = pytest.mark.faults

SLOW = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if os.path.exists({mark!r}):
        time.sleep(0.05)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""
SETTINGS: dict[str, Any] = {
    "launch": {"nodes": 2, "reward_processes": 2, "nurseries": False},  # forked workers need no interpreter
    "trainer": {"total_iterations": 20},
    "checkpoint": {"save_every": 5},
}


def test_a_run_goes_on_while_a_worker_cannot_begin_and_its_results_are_the_same(tmp_path: Path) -> None:
    """A reward process is killed, and its next one stands still: another scores, the loop goes on."""
    run = RunFile(tmp_path / "still", SETTINGS)
    python, mark = tmp_path / "venv/bin/python", tmp_path / "slow"
    put_interpreter(python)
    mark.touch()
    run.write()
    (run.folder / "reward.py").write_text(SLOW.format(mark=str(mark)))
    process = subprocess.Popen(
        [str(python), "-m", "yatt.cli.main", "run", str(run.write())],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_for(lambda: rows(run.run_dir / "metrics.jsonl"), timeout_s=120, what="an iteration")
    with interpreter_that_stands_still(python) as lease:
        assert kill(pids(run, "yatt.reward")[0])
        (delay,) = wait_for(lambda: events(run, "worker.delay"), what="the delay to be told")
        seen = len(rows(run.run_dir / "metrics.jsonl"))
        wait_for(lambda: len(rows(run.run_dir / "metrics.jsonl")) > seen + 1, what="iterations")
        lease.release()
    mark.unlink()
    finish(process)
    assert delay["worker"].startswith("reward-") and "does not begin" in delay["error"]
    assert [e["worker"] for e in events(run, "worker.start") if e["t"] > delay["t"]] == [delay["worker"]]
    assert len(events(run, "attempt.start")) == 2, "one attempt"
    calm = RunFile(
        tmp_path / "calm",
        {**SETTINGS, "rewards": [{"name": "digits", "path": str(run.folder / "reward.py")}]},
    )
    assert (done := yatt("run", str(calm.write()))).returncode == 0, done.stdout
    assert metrics(run) == metrics(calm)
    assert final_state(run) == final_state(calm)


def supervisor_of(folder: Path, start_timeout_s: float, told: list[str]) -> Supervisor:
    run = config(1, 1, 0, 0)
    run = replace(run, launch=replace(run.launch, start_timeout_s=start_timeout_s))
    node = Node(
        config=run, paths=RunPaths(folder), placement=placement_of(run), attempt=1, index=0, host="127.0.0.1",
        device="cpu",
    )  # fmt: skip
    node.paths.log(1, "x").parent.mkdir(parents=True)

    supervisor = Supervisor(node, EventLog(attempt=1, node=0, role="controller", sink=lambda _: None))
    supervisor.exits.put_nowait = lambda exit: told.append(exit[1])  # type: ignore[method-assign]
    return supervisor


async def turns_until(start: "asyncio.Task[None]") -> int:
    """How often the event loop had time for others meanwhile; a call that blocks it is one turn."""
    turns = 0
    while not start.done():
        await asyncio.sleep(0.01)
        turns += 1
    start.result()
    return turns


@pytest.mark.parametrize("how", ["time", "taken back", "closed"])
def test_a_start_that_stands_still_is_given_up(how: str, tmp_path: Path, monkeypatch) -> None:
    limit_s = 3.0 if how == "time" else 600.0
    told: list[str] = []
    before = children_of(os.getpid())

    async def main() -> None:
        supervisor = supervisor_of(tmp_path, limit_s, told)
        (worker,) = (w for w in supervisor.workers.values() if w.role == ROLLOUT)
        start = asyncio.create_task(supervisor.start(worker))
        watch = asyncio.create_task(turns_until(start))
        await asyncio.sleep(1.0)
        assert worker.is_running and worker.process.child is None
        if how == "taken back":
            worker.process.is_unwanted = True
        elif how == "closed":
            await supervisor.close(1.0)
        assert await watch > 20, "the loop went on"
        assert not worker.is_running
        while how == "time" and children_of(os.getpid()) - before:
            await asyncio.sleep(0.01)
        assert children_of(os.getpid()) <= before

    with interpreter_that_stands_still(tmp_path / "venv/bin/python"):
        monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
        asyncio.run(asyncio.wait_for(main(), HANG_S))
    expected = {
        "time": [f"could not be started: {tmp_path}/venv/bin/python does not begin"],
        "taken back": ["was not started: its GPU set was taken back"],
        "closed": [],
    }
    assert told == expected[how]
