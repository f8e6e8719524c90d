"""Workers that are killed while they start: that is nobody's fault, up to a number."""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import zmq

from tests.runs import RunFile, kill, living, rows, start
from tests.unit.core.test_placement import config
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import listening_socket
from yatt.control.components import build_components
from yatt.control.gpus.workers import MOST_DEATHS
from yatt.control.membership.failure_reports import FailureReports
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.control.rollouts.scoring.reward_pool import KILLED
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths


def killed_until_trouble(root: Path) -> tuple[list[tuple[str, int]], int]:
    """What an engine that is killed at each start comes to, and how often it was killed."""
    run = config(1, 1, 0, 0)
    node = Node(
        config=run, paths=RunPaths(root), placement=placement_of(run), attempt=1, index=0, host="127.0.0.1",
        device="cpu",
    )  # fmt: skip
    node.paths.log(1, "x").parent.mkdir(parents=True)
    troubles: list[tuple[str, int]] = []

    async def scene() -> int:
        async def watch_exits() -> None:  # as a controller does
            while True:
                worker, how = await parts.supervisor.exits.get()
                parts.workers.forget(worker, how)
                parts.arbiter.died(worker)

        async def deliver(report) -> None:
            troubles.append((report.error, report.exit_code))

        context = zmq.Context()
        socket = listening_socket(context, f"ipc://{root}/server")
        server = Channel(socket, attempt=1, handler=lambda *_: None, resend_s=0)
        events = EventLog(attempt=1, node=0, role="controller", sink=lambda _: None)
        parts = build_components(node, server, Peers(), events, FailureReports(events, deliver))
        slab = node.slabs[0]
        arbiter = asyncio.gather(parts.arbiter.run(), parts.reports.run(), watch_exits())
        (engine,) = (w for w in parts.supervisor.workers.values() if w.role == ROLLOUT)
        parts.arbiter.want(slab, ROLLOUT)
        kills, killed = 0, ""
        while not troubles:
            if engine.process.child is not None and engine.address != killed:
                await asyncio.sleep(0.3)
                killed, kills = engine.address, kills + 1
                engine.process.child.signal_group(9)
            await asyncio.sleep(0.02)
        await parts.supervisor.close(1.0)
        arbiter.cancel()
        await server.close()
        context.destroy(linger=0)
        return kills

    return troubles, asyncio.run(asyncio.wait_for(scene(), 300))


def test_an_engine_may_be_killed_at_its_start_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="yt-") as folder:
        program = Path(folder) / "worker"
        program.write_text("#!/bin/sh\nexec sleep 60\n")  # it starts for ever
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        troubles, kills = killed_until_trouble(Path(folder))
    assert kills == MOST_DEATHS
    assert troubles[0][1] == 1
    assert f"ended {MOST_DEATHS} times in a row" in troubles[0][0]


def test_engines_and_reward_processes_killed_at_their_first_start_cost_no_attempt(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"trainer": {"total_iterations": 1}})
    process, killed = start("run", str(run.write())), Counter[str]()
    while process.poll() is None:
        for pid, module in living(run.run_dir).items():
            if module in ("yatt.rollout", "yatt.reward") and killed[module] < 3:
                killed[module] += kill(pid)
        time.sleep(0.1)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    events = rows(run.run_dir / "events.jsonl")
    assert {event["attempt"] for event in events if event["kind"] == "attempt.start"} == {1}
    assert killed == {"yatt.rollout": 3, "yatt.reward": 3}
    ends = [event for event in events if event["kind"] == "worker.end" and event["how"] == KILLED]
    assert len(ends) >= 6
