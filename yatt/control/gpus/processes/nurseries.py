"""This node's nurseries: which workers are forked, from when on, and what happens if they cannot be.

A nursery is worth its memory where several workers of a kind start together, or where one that ends is
started again. In the first case it is started with them, and imports instead of them. In the second it
imports beside the running worker, once that has come up. Nothing depends on a nursery: one that ends, refuses
or stands still costs an exec.
"""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from yatt import clock
from yatt.adapters.net.crowd import Spawned
from yatt.adapters.processes.nursery_link import MOST_BYTES, READY, REFUSED, Fork
from yatt.adapters.processes.process import Child, ChildProgram, ChildStart
from yatt.config.schema import RunConfig
from yatt.control.gpus.processes.worker_environment import WorkerEnvironment
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.control.node import Node
from yatt.core.gpus.placement import TRAINER, genrm_of_role
from yatt.engine.environment import choose_engine
from yatt.errors import ConfigError
from yatt.obs.story.events import EventLog
from yatt.records.events.processes import NurseryEnded, NurseryReady

_LOG = logging.getLogger(__name__)
NURSERY = "nursery"
"""How the names of nurseries begin."""

MOST_LIVES = 3
"""Number of times that a kind's nursery is started in an attempt."""

LOOK_S = 0.1
STILL_S = 5.0
"""Time without work of a nursery that imports after which a worker is started by exec instead."""

END_S = 3.0
"""Longest time for the end of a killed nursery, unless it hangs in the kernel."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Workers that import the same.

    Attributes:
        mains: packages whose main modules they run.
        preload: module whose `preload` imports their libraries.
        is_restarted: whether one that ends is started again in the same attempt.
    """

    name: str
    mains: tuple[str, ...]
    preload: str
    is_restarted: bool = True


ENGINES = ("yatt.rollout", "yatt.genrm")
LIGHT = ("yatt.reward", "yatt.uploader", "yatt.trainer", *ENGINES)
KINDS = {
    "trainer": Kind("trainer", ("yatt.trainer",), "yatt.trainer.preload", is_restarted=False),
    "vllm": Kind("vllm", ENGINES, "yatt.engine.preload"),
    "transformers": Kind("transformers", ENGINES, "yatt.engine.preload"),
    "scripted": Kind("scripted", LIGHT, "yatt.engine.preload"),
}
"""By name. Reward processes and uploaders import little, as do engines and ranks that follow a script."""


def nursery_kind(worker: Worker, config: RunConfig) -> Kind | None:
    """Returns what a worker imports; None if no nursery serves it."""
    if worker.role == TRAINER:
        name = "scripted" if config.model.trainer == "scripted" else "trainer"
    elif worker.is_engine:
        genrm = genrm_of_role(worker.role)
        wanted = next((each.engine for each in config.genrms if each.name == genrm), config.rollout.engine)
        try:
            name = choose_engine(wanted, "engine")
        except ConfigError:
            return None  # the worker itself says so
    else:
        name = "scripted"
    kind = KINDS[name]
    return kind if worker.argv[0] in kind.mains else None


@dataclass(slots=True, eq=False)
class _Nursery:
    """One process. `settled` is done once it is ready, or over."""

    name: str
    settled: "asyncio.Future[None]"
    link: socket.socket
    start: ChildStart | None = None
    child: Child | None = None
    is_ready: bool = False
    is_over: bool = False


@dataclass(slots=True)
class _KindState:
    """What there is of a kind: the number of its workers, and of its nurseries so far; the present one."""

    num_workers: int = 0
    lives: int = 0
    open: _Nursery | None = None


@dataclass(slots=True)
class Nurseries:
    """The nurseries of one node.

    Args:
        workers: all workers of the node.
        open_log: opens the log of a process with this name; returns its path and descriptor.
    """

    node: Node
    events: EventLog
    workers: dict[str, Worker]
    environment: WorkerEnvironment
    open_log: Callable[[str], Awaitable[tuple[Path, int]]]
    _kinds: dict[str, Kind | None] = field(default_factory=dict)
    _states: dict[str, _KindState] = field(default_factory=lambda: defaultdict(_KindState))  # by kind
    _begun: list[_Nursery] = field(default_factory=list)  # all of the attempt: a few a kind
    _tasks: Spawned = field(default_factory=Spawned)
    _closing: bool = False

    def __post_init__(self) -> None:
        if self.node.config.launch.nurseries:
            self._kinds = {name: nursery_kind(w, self.node.config) for name, w in self.workers.items()}
        for kind in filter(None, self._kinds.values()):
            self._states[kind.name].num_workers += 1

    async def fork_for(self, worker: Worker, until_s: float) -> Fork | None:
        """Returns the order with which this worker is to be started; None: by exec.

        While the nursery imports, this waits: a process of its own would import the same. It does not wait
        for one that stands still.

        Raises:
            TimeoutError: it still imports at `until_s`.
        """
        kind = self._kinds.get(worker.name)
        if kind is None:
            return None
        state = self._states[kind.name]
        if state.open is None and state.num_workers > 1:
            self._begin(kind, worker)
        nursery = state.open
        if nursery is None:
            return None
        if await self._stands_still(nursery, worker, until_s) and state.open is nursery:
            self._drop(kind, f"it has stood still for {STILL_S:g} s while it imported")
        return Fork(nursery.link) if nursery.is_ready and not nursery.is_over else None

    def came_up(self, worker: Worker) -> None:
        """Notes that a worker accepts orders: from now on its kind may be started again."""
        kind = self._kinds.get(worker.name)
        if kind is None:
            return
        if kind.is_restarted:
            if self._states[kind.name].open is None:
                self._begin(kind, worker)
        elif all(w.process.hello.is_set() for w in self.workers.values() if self._kinds[w.name] is kind):
            self._drop(kind, "")

    def not_forked(self, worker: Worker, fork: Fork, why: str) -> None:
        """Notes that a nursery that was ready has not forked this worker: it is ended, and later replaced."""
        kind = self._kinds.get(worker.name)
        if kind is None or (nursery := self._states[kind.name].open) is None:
            return
        if fork.link is nursery.link:  # else it is over, and there is another one
            self._drop(kind, why)

    def marks(self) -> dict[int, str]:
        """Returns the nurseries' process groups, with the mark in their environment."""
        found = ((each.child, self.environment.mark(each.name)) for each in self._all_open())
        return {child.pid: mark for child, mark in found if child is not None}

    async def close(self) -> None:
        """Ends all of them. Waits for the end of those too that were given up before."""
        self._closing = True
        for nursery in self._all_open():
            self._end(nursery)
        over = {each.start.over for each in self._begun if each.start is not None}
        if over:
            await asyncio.wait(over, timeout=END_S)
        self._tasks.cancel()

    def _all_open(self) -> list[_Nursery]:
        return [state.open for state in self._states.values() if state.open is not None]

    async def _stands_still(self, nursery: _Nursery, worker: Worker, until_s: float) -> bool:
        """Waits until a nursery is ready or over, and returns False; or until it has stopped to work.

        Raises:
            TimeoutError: it still imports at `until_s`.
        """
        work, since_s = None, clock.monotonic_s()
        while not nursery.settled.done() and not (self._closing or worker.process.is_unwanted):
            await asyncio.wait({nursery.settled}, timeout=LOOK_S)
            done = _work_of(nursery.child.pid) if nursery.child is not None else None
            if done != work:
                work, since_s = done, clock.monotonic_s()
            elif clock.monotonic_s() - since_s > STILL_S:
                return True
            if clock.monotonic_s() > until_s and not nursery.settled.done():
                raise TimeoutError(errno.ETIMEDOUT, f"{nursery.name} still imports its libraries")
        return False

    def _begin(self, kind: Kind, worker: Worker) -> None:
        state = self._states[kind.name]
        if self._closing or state.lives >= MOST_LIVES:
            return
        loop = asyncio.get_running_loop()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # no descriptors: later, or never
            _LOG.warning("no nursery of kind %s: %s", kind.name, error.strerror or error)
            return
        state.lives += 1
        ours.setblocking(False)
        name = f"{NURSERY}-{kind.name}-n{self.node.index}.{state.lives}"
        nursery = state.open = _Nursery(name, loop.create_future(), ours)
        self._begun.append(nursery)
        self._tasks.spawn(self._live(kind, worker, nursery, theirs))

    async def _live(self, kind: Kind, worker: Worker, nursery: _Nursery, theirs: socket.socket) -> None:
        """The life of one nursery, to its end."""
        began_s, why = clock.monotonic_s(), "it has ended"
        try:
            with theirs:
                nursery.child = await self._started(kind, worker, nursery, theirs.fileno())
            loop = asyncio.get_running_loop()
            answer = await loop.sock_recv(nursery.link, MOST_BYTES)
            if answer == READY:
                nursery.is_ready = True
                nursery.settled.set_result(None)
                self.events.emit(
                    NurseryReady(
                        nursery=nursery.name,
                        pid=nursery.child.pid,
                        seconds=round(clock.monotonic_s() - began_s, 3),
                    )
                )
                answer = await loop.sock_recv(nursery.link, MOST_BYTES)
            why = answer.removeprefix(REFUSED).decode(errors="replace") or why
        except OSError as error:
            why = error.strerror or str(error)
        finally:  # not before: the event loop would take the next socket with its number for this one
            nursery.link.close()
        if self._states[kind.name].open is nursery:  # else it was ended on purpose
            self._drop(kind, why)

    async def _started(self, kind: Kind, worker: Worker, nursery: _Nursery, link: int) -> Child:
        """Starts the process.

        Raises:
            OSError: it cannot be started.
        """
        log, output = await self.open_log(nursery.name)
        argv = [
            sys.executable,
            "-P",
            "-m",
            "yatt.adapters.processes.nursery",
            "--kind",
            kind.name,
            "--mains",
            ",".join(kind.mains),
            "--preload",
            kind.preload,
            "--device",
            self.node.device,
            "--threads",
            str(self.node.config.launch.threads_per_worker),
            "--link",
            str(link),
            "--run",
            str(self.node.paths.root),
            "--attempt",
            str(self.node.attempt),
            "--name",
            nursery.name,
        ]
        program = ChildProgram(argv, self.environment.of_nursery(nursery.name, worker), pass_fds=[link])
        nursery.start = ChildStart(nursery.name, program, output=output, log=log)
        child = await nursery.start.begun
        if nursery.is_over:
            child.signal_group(signal.SIGKILL)
        return child

    def _drop(self, kind: Kind, why: str) -> None:
        """Ends a kind's nursery.

        Args:
            why: what was wrong with it; empty if it is only not needed any more.
        """
        nursery, self._states[kind.name].open = self._states[kind.name].open, None
        if nursery is None:
            return
        self._end(nursery)
        if why and not self._closing:
            self.events.emit(NurseryEnded(nursery=nursery.name, why=why))

    def _end(self, nursery: _Nursery) -> None:
        nursery.is_over = True
        if not nursery.settled.done():
            nursery.settled.set_result(None)
        if nursery.start is not None:
            nursery.start.give_up()
        with contextlib.suppress(OSError):  # closed
            nursery.link.shutdown(socket.SHUT_RDWR)


def _work_of(pid: int) -> tuple[bytes, ...] | None:
    """Returns counters of a process that change while it imports: page faults and CPU time."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return tuple(file.read(4096).rpartition(b")")[2].split()[7:13])
    return None
