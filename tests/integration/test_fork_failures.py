"""A worker that cannot be forked is tried again and told of; after its time it has died like any other."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.runs import HANG_S, environment

PROGRAM = """
import asyncio, json, os, resource, sys
from dataclasses import replace
from pathlib import Path
from tests.unit.core.test_placement import config
from yatt.control.node import Node
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths

root, start_timeout_s, lifts = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "lifts"
sys.executable = str(root / "worker")
if os.getuid() == 0:  # the limit does not hold for root
    os.setgid(65534)
    os.setuid(65534)
run = config(1, 1, 0, 0)
run = replace(run, launch=replace(run.launch, start_timeout_s=start_timeout_s))
node = Node(
    config=run, paths=RunPaths(root), placement=placement_of(run), attempt=1, index=0, host="127.0.0.1",
    device="cpu",
)
paths = node.paths.log(1, "x").parent
paths.mkdir(parents=True)
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
dead = []

def lift():
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))

def say(line):
    print(line, flush=True)
    if lifts and json.loads(line)["kind"] == "worker.delay":
        lift()

async def main():
    ended = asyncio.Event()

    async def watch_exits():
        while True:
            worker, how = await supervisor.exits.get()
            say(json.dumps({"kind": "on_exit", "worker": worker.name, "how": how}))
            ended.set()

    events = EventLog(attempt=1, node=0, role="controller", sink=say)
    supervisor = Supervisor(node, events)
    watching = asyncio.ensure_future(watch_exits())
    (worker,) = (w for w in supervisor.workers.values() if w.role == ROLLOUT)

    def fill():
        resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
        if log.exists():
            os.open(log, os.O_RDONLY | os.O_NONBLOCK)  # now the thread that opens the log goes on

    log = node.paths.log(1, f"{worker.name}.1")
    if sys.argv[4] == "fork":
        os.mkfifo(log)
        asyncio.get_running_loop().call_later(0.3, fill)
    else:
        fill()
    await asyncio.wait_for(supervisor.start(worker), 180)
    if worker.process.child is None:
        await asyncio.wait_for(ended.wait(), 180)
    say(json.dumps({"kind": "alive", "is": worker.process.child is not None, "running": worker.is_running}))
    lift()
    await supervisor.close(1.0)

asyncio.run(main())
"""


TAKEN_BACK = """
import asyncio, json, os, resource, sys
from dataclasses import replace
from pathlib import Path
import zmq
from tests.unit.core.test_placement import config
from yatt.adapters.net.curve import listening_socket
from yatt.adapters.net.channel import Channel
from yatt.control.components import build_components
from yatt.control.node import Node
from yatt.control.membership.failure_reports import FailureReports
from yatt.control.membership.peers import Peers
from yatt.core.gpus.lease import Stage
from yatt.core.gpus.placement import ROLLOUT, TRAINER, placement_of
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths

root = Path(sys.argv[1])
sys.executable = str(root / "worker")
if os.getuid() == 0:  # the limit does not hold for root
    os.setgid(65534)
    os.setuid(65534)
run = config(1, 1, 0, 0)
run = replace(run, lease=replace(run.lease, release_s=0.5, term_s=0.5))
node = Node(
    config=run, paths=RunPaths(root), placement=placement_of(run), attempt=1, index=0, host="127.0.0.1",
    device="cpu",
)
node.paths.log(1, "x").parent.mkdir(parents=True)
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
told = []

def say(line):
    print(line, flush=True)
    told.append(json.loads(line)["kind"])

async def until(kind):
    while kind not in told:
        await asyncio.sleep(0.02)

async def main():
    async def watch_exits():  # as a controller does
        while True:
            worker, how = await parts.supervisor.exits.get()
            parts.workers.forget(worker, how)
            parts.arbiter.died(worker)

    server = Channel(
        listening_socket(zmq.Context(), f"ipc://{root}/s"), attempt=1, handler=lambda *_: None, resend_s=0
    )
    events = EventLog(attempt=1, node=0, role="controller", sink=say)
    parts = build_components(node, server, Peers(), events, FailureReports(events, None))
    slab, arbiter = node.slabs[0], asyncio.gather(parts.arbiter.run(), watch_exits())
    await asyncio.sleep(0.2)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
    parts.arbiter.want(slab, ROLLOUT)
    await until("worker.delay")
    parts.arbiter.want(slab, TRAINER)
    await until("worker.end")
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    while parts.arbiter.lease(slab).stage is not Stage.HELD or parts.arbiter.lease(slab).holder != TRAINER:
        await asyncio.sleep(0.05)
    await asyncio.sleep(2.5)
    await parts.supervisor.close(1.0)
    arbiter.cancel()
    os._exit(0)

asyncio.run(asyncio.wait_for(main(), 180))
"""


def test_a_slab_that_is_taken_back_from_what_cannot_be_forked_is_used_by_one_role_alone() -> None:
    events = run_program(TAKEN_BACK)
    rollout = [e for e in events if e.get("worker", "").startswith("rollout") and e["kind"] != "worker.delay"]
    assert [event["kind"] for event in rollout] == ["worker.end"], rollout
    assert rollout[0]["how"] == "was not started: its GPU set was taken back"
    grants = [event["holder"] for event in events if event["kind"] == "lease.grant"]
    assert grants == ["rollout", "trainer"]


def told(start_timeout_s: float, lifts: str, *, fails: str) -> list[dict]:
    """What a supervisor says that may have no more processes.

    Args:
        lifts: "lifts": there is room again once it has said so; else there is none.
        fails: "thread", the one that opens the worker's log, or "fork" after that.
    """
    return run_program(PROGRAM, str(start_timeout_s), lifts, fails)


def run_program(program: str, *words: str) -> list[dict]:
    """The events that it prints."""
    with tempfile.TemporaryDirectory(prefix="yatt-fork-") as name:
        root = Path(name)
        root.chmod(0o777)
        (root / "worker").write_text("#!/bin/sh\nexec sleep 60\n")
        (root / "worker").chmod(0o755)
        argv = [sys.executable, "-c", program, name, *words]
        done = subprocess.run(
            argv,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
            cwd=os.getcwd(),
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("fails", ["thread", "fork"])
def test_a_worker_that_cannot_be_forked_is_tried_again_until_it_can(fails: str) -> None:
    events = told(start_timeout_s=60, lifts="lifts", fails=fails)
    kinds = [event["kind"] for event in events if event["kind"] != "worker.end"]
    assert kinds == ["worker.delay"] * (len(kinds) - 2) + ["worker.start", "alive"]
    assert len(kinds) > 2
    assert next(event for event in events if event["kind"] == "alive")["is"]
    assert "trying again for up to 60 s" in events[0]["error"]


def test_a_worker_that_cannot_be_forked_in_time_has_died_like_any_other() -> None:
    *_, end, reported, alive = told(start_timeout_s=1.0, lifts="", fails="fork")
    assert (end["kind"], end["how"]) == ("worker.end", reported["how"])
    assert reported["how"].startswith("could not be started: ")
    assert (alive["is"], alive["running"]) == (False, False)
