"""Engines that are ended because they get other weights: no failure, whatever state they were in."""

import asyncio
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S, until
from tests.unit.control.test_worker_orders import JUDGE, Socket
from tests.unit.core.test_placement import config as colocated
from yatt.control.gpus import unfit as unfit_module
from yatt.control.gpus.arbiter import Arbiter, Holding
from yatt.control.gpus.engines import LocalEngines
from yatt.control.gpus.judge_folders import JudgeFolders
from yatt.control.gpus.memory_check import SlabProcesses
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.control.gpus.unfit import UnfitEngines
from yatt.control.gpus.weights.publications import Publications
from yatt.control.gpus.workers import Workers
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.core.gpus.lease import MemoryChecked
from yatt.core.gpus.placement import placement_of
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths
from yatt.records.weights import UseJudges


@dataclass
class StandIn:
    """A process that ends when it is killed."""

    ended: "asyncio.Future[int]"
    pid: int = 1
    log: str = "x"

    def signal_group(self, number: int) -> None:
        if number == signal.SIGKILL and not self.ended.done():
            self.ended.set_result(-number)


class Bench:
    """A slab that a judge may get by a move; its processes come up when `comes_up` says so."""

    def __init__(self, comes_up: Callable[[], bool]) -> None:
        config = colocated(1, 1, 1, 0)
        (genrm,) = config.genrms
        config = replace(config, genrms=(replace(genrm, refresh=replace(genrm.refresh, url="/store")),))
        node = Node(
            config=config, paths=RunPaths(Path("/r")), placement=placement_of(config),
            attempt=1, index=0, host="", device="cpu",
        )  # fmt: skip
        self.slab = node.slabs[0]
        node = replace(node, placement=replace(node.placement, shared=frozenset([self.slab])))
        self.comes_up, self.failures = comes_up, list[Any]()
        self.lines: list[dict[str, Any]] = []
        self.argvs: list[tuple[str, ...]] = []
        events = EventLog(
            attempt=1, node=0, role="controller", sink=lambda line: self.lines.append(json.loads(line))
        )
        self.supervisor = Supervisor(node, events)
        self.supervisor._fork = self._fork  # type: ignore[method-assign]
        self.supervisor.orphans.worker_ended = lambda: None  # type: ignore[method-assign]
        self.supervisor.shared_memory.ended = _nothing  # type: ignore[method-assign]
        self.supervisor.where = _nowhere  # type: ignore[method-assign]
        engines = LocalEngines(Socket(), config)  # type: ignore[arg-type]
        self.unfit = UnfitEngines(node, events, lambda error, code: self.failures.append((error, code)))
        publications = Publications(node, Peers(), events, Progress(int))
        self.workers = Workers(node, self.supervisor, engines, publications, self.unfit, events)
        self.arbiter = Arbiter(
            node, self.supervisor, events,
            Holding(wake=self.workers.wake, sleep=self.workers.sleep, restart=self.workers.restart,
                    take_back=self.workers.take_back),
            lambda error, code, *_: self.failures.append((error, code)),
        )  # fmt: skip
        self.unfit.subscribe(self.arbiter.give_back)
        self.judge = self.supervisor.of(JUDGE, self.slab)[0]
        self.folders = JudgeFolders(node, self.supervisor)

    async def _fork(self, worker: Worker, _: float) -> None:
        self.argvs.append(worker.argv)
        await asyncio.sleep(0.05)
        if worker.process.is_unwanted:
            return
        child = StandIn(asyncio.get_running_loop().create_future())
        worker.process.child = child  # type: ignore[assignment]
        child.ended.add_done_callback(lambda ended: self.supervisor._ended(worker, child, ended))  # type: ignore[arg-type]
        if self.comes_up():
            worker.process.hello.set()

    async def watch_exits(self) -> None:
        while True:
            worker, how = await self.supervisor.exits.get()
            self.workers.forget(worker, how)
            self.arbiter.died(worker)


async def _nothing(_: int) -> None: ...


async def _nowhere(_: Worker) -> str:
    return ""


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlabProcesses, "measured", lambda *_: MemoryChecked(True, ""))
    monkeypatch.setattr(SlabProcesses, "movable_bytes", lambda *_: 0)
    monkeypatch.setattr(SlabProcesses, "learn", lambda *_: None)
    monkeypatch.setattr(unfit_module, "engine_host_bytes", lambda *_: 0)


@pytest.mark.parametrize("state", ["begins", "starts", "is awake"])
def test_an_engine_of_other_weights_is_built_anew_and_nothing_has_failed(state: str) -> None:
    async def play() -> Bench:
        is_up = state == "is awake"
        bench = Bench(lambda: is_up)
        tasks = [asyncio.ensure_future(bench.watch_exits()), asyncio.ensure_future(bench.arbiter.run())]
        await asyncio.sleep(0)
        quiet = len(asyncio.all_tasks())
        bench.arbiter.want(bench.slab, JUDGE)
        states: dict[str, Callable[[], bool]] = {
            "begins": lambda: bench.judge.is_running,
            "starts": lambda: bench.judge.process.child is not None,
            "is awake": lambda: bench.arbiter.is_awake(bench.slab, JUDGE),
        }
        await until(states[state], "the engine")
        is_up = True
        before = bench.judge.address
        order = UseJudges(folders={"g0": "/new"})
        await asyncio.wait_for(bench.folders.use(order), HANG_S)
        await until(lambda: bench.arbiter.is_awake(bench.slab, JUDGE), "the engine of the new weights")
        assert bench.judge.address != before
        after = bench.judge.address
        await bench.folders.use(order)
        assert bench.judge.address == after, "the same weights change nothing"
        await until(lambda: len(asyncio.all_tasks()) == quiet, "those who waited for its start")
        for task in tasks:
            task.cancel()
        return bench

    bench = asyncio.run(play())
    assert not bench.unfit.found() and not bench.failures
    assert not [line for line in bench.lines if line["kind"] == "engine.unfit"]
    assert bench.argvs[-1][-2:] == ("--model", "/new")
    assert bench.arbiter.lease(bench.slab).holder == JUDGE
