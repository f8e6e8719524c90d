"""Simulated nodes for the phase-switch benchmark: real controllers and sockets, workers that answer at once.

Node 0, the leader, has a process of its own; the others share a few, each started as
``python -m tests.bench.cluster RUN_FOLDER FIRST_NODE LAST_NODE``. What is real: coordinator,
CURVE over TCP, controllers, arbiters, events, the workers' sockets, and the
measurement of memory of real (idle) processes. What is not: the workers' work.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import zmq

from yatt.adapters.files.files import append_line, make_private, read_or_none, write_atomically
from yatt.adapters.machine.collector import collect_rarely
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import CurveKeys, calling_socket, listening_socket, roomy_context
from yatt.adapters.processes.process import ChildProgram, ChildStart, open_log
from yatt.config.load import load_resolved
from yatt.control.components import build_components
from yatt.control.controller import Controller
from yatt.control.leader.background import Background
from yatt.control.leader.coordinator import Coordinator
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.slabs.node_loads import NodeLoads
from yatt.control.leader.slabs.slabs import Slabs
from yatt.control.membership.event_sender import EventSender
from yatt.control.membership.failure_reports import FailureReports
from yatt.control.membership.peers import Peers
from yatt.control.membership.rendezvous import LEADER_PAUSE_S
from yatt.control.node import Node
from yatt.core.gpus.placement import placement_of
from yatt.core.phases import phases
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m

ATTEMPT = 1
START_LIMIT_S = 60.0


class InstantActs:
    """Every phase's own work takes no time: what is left of a phase is the switch."""

    def __init__(self, slabs: Slabs, inbox: Inbox) -> None:
        self.slabs, self._inbox = slabs, inbox

    async def run(self, act: phases.Act) -> phases.Acted:
        if act.phase is phases.Phase.SAVE:  # its upload takes no time either
            asyncio.get_running_loop().call_soon(self._inbox.put, phases.Committed(act.iteration))
        return phases.Acted(act.seq)

    def took(self, phase: phases.Phase, seconds: float) -> None:
        pass

    def enter(self, category: str, now_s: float) -> None:
        pass

    async def end(self, end: phases.End) -> None:
        pass


class SimulatedNode:
    """One controller, and a stand-in for each of its workers."""

    def __init__(self, root: Path, index: int, context: zmq.Context) -> None:
        paths = RunPaths(root)
        config = load_resolved(paths.config)
        self.node = Node(
            config=config, paths=paths, placement=placement_of(config), attempt=ATTEMPT, index=index,
            host="127.0.0.1", device="cpu",
        )  # fmt: skip
        make_private(self.node.scratch)
        self.context, self.keys = context, CurveKeys(paths.keys)
        self.peers = Peers()
        self.addresses: dict[int, str] = {}
        self.sender = EventSender(self.peers)
        self.channels: list[Channel] = []
        self.tasks: set[asyncio.Task] = set()
        events = EventLog(attempt=ATTEMPT, node=index, role="controller", sink=self._emit)
        self.events = events
        server = self._channel(listening_socket(context, self.node.endpoint), self._from_worker)
        socket = listening_socket(context, f"tcp://{self.node.host}:*", self.keys)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._channel(socket).serve(self._from_peer, pause_s=LEADER_PAUSE_S if index == 0 else 0.0)
        self.parts = build_components(
            self.node, server, self.peers, events, FailureReports(events, self._failed)
        )
        # Told to every trainer node: of N simulated nodes on one machine N x N messages (see the notes).
        self.parts.engines._subscribers.clear()
        # No phase of the benchmark samples or trains, so there is nothing to own.
        self.controller = Controller(self.node, self.parts, None)

    async def start(self) -> None:
        """Idle processes as workers, and a socket that answers in the name of each."""
        for worker in self.parts.supervisor.workers.values():
            worker.starts = 1
            log = self.node.paths.log(ATTEMPT, worker.name)
            idle = ChildStart(
                worker.name, ChildProgram(["/bin/sleep", "600"], {}), output=open_log(log), log=log
            )
            worker.process.child = await idle.begun
            worker.process.hello_bytes = self.parts.arbiter.weigh(worker)
            worker.process.hello.set()
            socket = calling_socket(self.context, self.node.endpoint, worker.address)
            line = self._channel(socket, answer_at_once, peer="controller")
            self.tasks.add(
                asyncio.create_task(line.tell("controller", m.Hello(worker=worker.address, pid=1)))
            )
        works = (self.parts.arbiter.run(), self.parts.reports.run(), self._watch_exits())
        self.tasks |= {asyncio.create_task(work) for work in works}

    def dial(self, index: int, address: str) -> None:
        self.addresses[index] = address
        self.peers.lines.dial_with(self._line)

    def _line(self, name: str, _: str) -> Channel:
        address = self.addresses[int(name.removeprefix("node"))]
        return self._channel(
            calling_socket(self.context, address, self.node.name, self.keys), self._from_peer, peer=name
        )

    async def close(self) -> None:
        for worker in self.parts.supervisor.workers.values():
            if worker.process.child is not None:
                worker.process.child.signal_group(signal.SIGKILL)
                await worker.process.child.ended
        await self.sender.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for channel in self.channels:
            await channel.close()

    def _channel(self, socket, handler=None, peer: str = "") -> Channel:
        channel = Channel(socket, attempt=ATTEMPT, handler=handler, peer=peer)
        self.channels.append(channel)
        return channel

    async def _from_worker(self, sender: str, body: m.Message) -> m.Message | None:
        return await self.controller.from_worker(sender, body)

    async def _from_peer(self, sender: str, body: m.Message) -> m.Message | None:
        if isinstance(body, c.EventLines):
            append_line(self.node.paths.events, body.lines.decode())
            return None
        return await self.controller.handle(sender, body)

    def _emit(self, line: str) -> None:
        if self.node.is_leader:
            append_line(self.node.paths.events, line)
        else:
            self.sender(line)

    def gave_up(self, index: int, life: int, why: str) -> None:
        raise AssertionError(f"node{index} gave up: {why}")

    async def _failed(self, report: c.FailureReport) -> None:
        raise AssertionError(report.error)

    async def _watch_exits(self) -> None:
        worker, how = await self.parts.supervisor.exits.get()
        raise AssertionError(f"{worker} {how}")


async def answer_at_once(sender: str, body: m.Message) -> m.Message | None:
    """What a worker says to any order."""
    return m.Done()


@contextlib.asynccontextmanager
async def nodes(
    root: Path, indices: range, kind: type[SimulatedNode] = SimulatedNode
) -> AsyncIterator[list[Any]]:
    """These nodes, started; ended with all their processes."""
    context = roomy_context(load_resolved(RunPaths(root).config).launch.nodes)
    made = [kind(root, index, context) for index in indices]
    try:
        collect_rarely()  # as a session does
        for each in made:
            await each.start()
            write_atomically(root / f"address-{each.node.index}", each.address.encode())
        yield made
    finally:
        for each in made:
            await each.close()
        context.term()


async def address_of(root: Path, index: int) -> str:
    for _ in range(int(START_LIMIT_S / 0.05)):
        found = read_or_none(root / f"address-{index}")
        if found:
            return found.decode()
        await asyncio.sleep(0.05)
    raise TimeoutError(f"node{index} did not say its address within {START_LIMIT_S:g} s")


def cpu_s() -> float:
    """Seconds of CPU this process has used, its zmq threads included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def lead(root: Path, num_nodes: int) -> float:
    """The leader's whole run; gives the seconds of CPU its process took for it."""
    async with nodes(root, range(1)) as (leader,):
        for index in range(1, num_nodes):
            leader.dial(index, await address_of(root, index))
        supervisor = leader.parts.supervisor
        ports = NodeClients(
            leader.node, leader.controller.handle, leader.peers, leader.gave_up, supervisor.work
        )
        await ports.ask_all(c.StatusQuery(), START_LIMIT_S)  # every line is up before the clock runs
        background = Background(Inbox())
        slabs = Slabs(leader.node, ports, NodeLoads(leader.parts.load), leader.events, background)
        acts = InstantActs(slabs, background.inbox)
        coordinator = Coordinator(leader.node, ports, acts, acts, leader.events, background)  # type: ignore[arg-type]
        before_s = cpu_s()
        end = await coordinator.run()
        assert end.exit_code == 0, end.reason
        return cpu_s() - before_s


async def follow(root: Path, indices: range) -> None:
    """These nodes, until told to end by SIGTERM; writes the seconds of CPU they took."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    leader = await address_of(root, 0)
    async with nodes(root, indices) as followers:
        for each in followers:
            each.dial(0, leader)
        before_s = cpu_s()
        while not stop.is_set() and os.getppid() != 1:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 1.0)
        write_atomically(root / f"cpu-{indices.start}", f"{cpu_s() - before_s}".encode())


if __name__ == "__main__":
    asyncio.run(follow(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3]) + 1)))
