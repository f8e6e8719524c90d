"""The nurseries of one controller: the end of one does no harm to it, nor to other nurseries."""

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.runs import HANG_S, LOADED, environment, kill
from tests.unit.core.test_placement import config
from yatt import clock
from yatt.adapters.processes.nursery_link import Fork
from yatt.adapters.processes.orphans import PR_SET_CHILD_SUBREAPER, adopt_orphans
from yatt.control.gpus.processes import nurseries
from yatt.control.gpus.processes.nurseries import KINDS, Kind
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import Worker, planned_workers
from yatt.control.node import Node
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths

START_S = 60.0 * LOADED


@pytest.fixture(autouse=True)
def subreaper() -> Iterator[None]:
    adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Scene:
    """A node with two engines, whose nursery imports what `tests.nursery.preload` says."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, planted: str = "", **launch: Any) -> None:
        for name, value in (environment() | {"PLANTED": planted}).items():
            monkeypatch.setenv(name, value)
        kind = Kind("scripted", ("tests.nursery",), "tests.nursery.preload")
        monkeypatch.setitem(KINDS, "scripted", kind)
        run = config(1, 2, 0, 0)
        run = replace(
            run, rollout=replace(run.rollout, engine="scripted"), launch=replace(run.launch, **launch)
        )
        node = Node(
            config=run, paths=RunPaths(root), placement=placement_of(run),
            attempt=1, index=0, host="127.0.0.1",
            device="cpu",
        )  # fmt: skip
        node.paths.log(1, "x").parent.mkdir(parents=True)
        self.told: list[str] = []
        monkeypatch.setattr(
            "yatt.control.gpus.processes.supervisor.planned_workers",
            lambda node: [replace(w, argv=("tests.nursery", *w.argv[1:])) for w in planned_workers(node)],
        )
        self.supervisor = Supervisor(
            node, EventLog(attempt=1, node=0, role="controller", sink=self.told.append)
        )
        self.engines = [w for w in self.supervisor.workers.values() if w.role == ROLLOUT]

        self.nurseries = self.supervisor.nurseries

    async def order(self, worker: Worker) -> Fork:
        """Waits for the nursery, as for a start that is then abandoned."""
        fork = await self.nurseries.fork_for(worker, clock.monotonic_s() + START_S)
        assert fork is not None
        fork._ours.close()
        fork._theirs.close()
        return fork

    def pids(self) -> list[int]:
        """The processes of nurseries that are in use."""
        return list(self.nurseries.marks())

    async def begun(self) -> None:
        """Waits until a nursery imports."""
        async with asyncio.timeout(START_S):
            while not self.pids():
                await asyncio.sleep(0.01)

    async def told_of(self, kind: str, number: int) -> None:
        async with asyncio.timeout(START_S):
            while len(self.events(kind)) < number:
                await asyncio.sleep(0.01)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in map(json.loads, self.told) if event["kind"] == kind]


@contextlib.asynccontextmanager
async def scene(*words: Any, **named: Any) -> AsyncIterator[Scene]:
    made = Scene(*words, **named)
    try:
        yield made
    finally:
        await made.supervisor.close(1.0)


def test_descriptors_of_a_nursery_that_is_ended_can_be_used_again(tmp_path, monkeypatch) -> None:
    """The event loop must not take a later socket for the one of the nursery."""

    async def main() -> None:
        async with scene(tmp_path, monkeypatch) as node:
            first, _ = node.engines
            fork = await node.order(first)
            node.nurseries.not_forked(first, fork, "a test says so")
            pairs, loop = [socket.socketpair() for _ in range(4)], asyncio.get_running_loop()
            try:
                for ours, theirs in pairs:
                    ours.setblocking(False)
                    reading = asyncio.ensure_future(loop.sock_recv(ours, 1))
                    await asyncio.sleep(0.01)
                    theirs.send(b"x")
                    assert await asyncio.wait_for(reading, HANG_S) == b"x"
            finally:
                for each in pairs:
                    for end in each:
                        end.close()

    asyncio.run(main())


def test_a_start_that_is_abandoned_does_not_end_the_nursery(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        async with scene(tmp_path, monkeypatch) as node:
            first, _ = node.engines
            await node.order(first)
            (pid,) = node.pids()
            assert kill(pid, signal.SIGSTOP)  # it is slow
            starting = asyncio.ensure_future(node.supervisor.start(first))
            while not any(worker.process.start for worker in node.supervisor.workers.values()):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # the order is sent
            first.process.is_unwanted = True
            await starting
            assert kill(pid, signal.SIGCONT)
            await node.order(first)
            assert node.pids() == [pid] and not node.events("nursery.end")

    asyncio.run(main())


def test_a_start_that_an_ended_nursery_refuses_does_not_end_the_next_one(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        async with scene(tmp_path, monkeypatch) as node:
            first, second = node.engines
            await node.order(first)
            begins, may_go_on, open_log = asyncio.Event(), asyncio.Event(), node.supervisor._open_log

            async def slowly(name: str) -> tuple[Path, int]:
                begins.set()
                await may_go_on.wait()
                return await open_log(name)

            monkeypatch.setattr(node.supervisor, "_open_log", slowly)
            starting = asyncio.ensure_future(node.supervisor.start(second))  # with an order to the first one
            await begins.wait()
            assert kill(node.pids()[0])
            await node.told_of("nursery.end", 1)
            await node.order(first)
            may_go_on.set()
            await starting
            assert [e["is_forked"] for e in node.events("worker.start")] == [False]
            assert len(node.events("nursery.end")) == 1
            await node.order(first)
            assert len(node.events("nursery.ready")) == 2, "the second nursery goes on"

    asyncio.run(main())


def test_the_end_does_not_wait_for_an_import(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        async with scene(tmp_path, monkeypatch, planted="a long import") as node:
            starting = asyncio.ensure_future(node.supervisor.start(node.engines[0]))
            await node.begun()
            await node.supervisor.close(grace_s=3600.0)
            await starting
            assert not node.events("worker.start")

    asyncio.run(main())


def test_the_end_waits_for_a_nursery_that_was_given_up_before(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        async with scene(tmp_path, monkeypatch) as node:
            fork = await node.order(node.engines[0])
            (pid,) = node.pids()
            node.nurseries.not_forked(node.engines[0], fork, "a test says so")
            await node.supervisor.close(1.0)
            with pytest.raises(ChildProcessError):  # it is not only dead: its owner has taken its exit code
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    asyncio.run(main())


def test_an_import_without_an_end_costs_the_time_of_a_start(tmp_path, monkeypatch) -> None:
    async def main() -> None:
        async with scene(tmp_path, monkeypatch, planted="a long import", start_timeout_s=2.0) as node:
            worker = node.engines[0]
            await asyncio.wait_for(node.supervisor.start(worker), HANG_S)
            (end,) = node.events("worker.end")
            assert end["how"] == "could not be started: nursery-scripted-n0.1 still imports its libraries"
            assert node.supervisor.exits.get_nowait() == (worker, end["how"])

    asyncio.run(main())


def test_a_lack_of_descriptors_costs_the_nursery_only(tmp_path, monkeypatch) -> None:
    """The first message of a worker is handled as without nurseries."""

    async def main() -> None:
        async with scene(tmp_path, monkeypatch) as node:
            lacking = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            with monkeypatch.context() as patched:
                patched.setattr(nurseries.socket, "socketpair", Mock(side_effect=lacking))
                node.nurseries.came_up(node.engines[0])
                assert await node.nurseries.fork_for(node.engines[0], clock.monotonic_s()) is None
            await node.order(node.engines[0])
            assert not node.events("nursery.end") and len(node.events("nursery.ready")) == 1

    asyncio.run(main())
