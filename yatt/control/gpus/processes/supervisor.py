"""Starts this node's worker processes, watches for their end, and ends them by process group.

Names of workers are made in `yatt.control.gpus.processes.worker_plan`.
"""

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from yatt import clock
from yatt.adapters.files.patience import is_passing
from yatt.adapters.machine.affinity import cpus_text, own_cpus
from yatt.adapters.net.crowd import Spawned
from yatt.adapters.processes import bound
from yatt.adapters.processes.orphans import end_orphans, find_orphans, kill_orphan, reap_children
from yatt.adapters.processes.process import END, Child, ChildProgram, ChildStart, log_tail, open_log
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.gpus.processes.nurseries import Nurseries
from yatt.control.gpus.processes.shared_memory import SharedMemoryWatch
from yatt.control.gpus.processes.worker_environment import WorkerEnvironment
from yatt.control.gpus.processes.worker_plan import Worker, planned_workers
from yatt.control.node import Node
from yatt.core.attempts.exits import describe_exit
from yatt.core.attempts.orphans import doomed_orphans
from yatt.core.gpus.placement import Slab
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.obs.story.events import EventLog
from yatt.records.events.processes import (
    NOT_NEEDED,
    WorkerDelayed,
    WorkerEnded,
    WorkerStarted,
    worker_name,
)
from yatt.records.events.saves import StoreAwaited

_LOG = logging.getLogger(__name__)
FORK_FIRST_S, FORK_MOST_S = 0.2, 2.0
BEGIN_LOOK_S, BEGIN_QUIET_S, BEGIN_END_S = 0.2, 5.0, 1.0
"""For a process that has not begun: the period of checks, the time until an event reports it, and the time
that its end may take after it is abandoned, unless it hangs in the kernel."""

RETIRED_LOOK_S = 0.05
"""Period of checks whether processes that are not needed any more have ended."""

LOG_S = 5.0
"""Longest time for the run folder to open a worker's log, or to read its end."""


ORPHANS_LOOK_S, ORPHANS_END_S = 1.0, 3.0
"""Period of looks for orphans, and the longest wait for their end."""


class OrphanWatch:
    """Ends what this node's workers started and left; `yatt.core.attempts.orphans` decides which ones.

    Args:
        living: returns the running workers: pid to the mark in their environment.
    """

    def __init__(self, living: Callable[[], dict[int, str]]) -> None:
        self._living = living
        self._known: set[int] = set()
        self._has_ended = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Reaps and ends orphans, forever. If there are no descriptors or threads, it tries again later."""
        while True:
            self._wake.clear()
            with contextlib.suppress(OSError):
                await self.look()
            with contextlib.suppress(TimeoutError):  # `wait_for` would lose a cancellation as it is woken
                async with asyncio.timeout(ORPHANS_LOOK_S):
                    await self._wake.wait()

    def worker_ended(self) -> None:
        """Notes that a worker has just ended."""
        self._has_ended = True
        self._wake.set()

    async def look(self) -> None:
        """Ends the doomed orphans. It reads in a thread, since reading the data of a hung process may block.

        Raises:
            OSError: no thread is available.
        """
        had_ended, self._has_ended = self._has_ended, False
        try:
            found, ended = await call_in_thread(partial(find_orphans, frozenset(self._living())))
        except OSError:
            self._has_ended |= had_ended
            raise
        living = self._living()  # a worker may have been started, or have ended, meanwhile
        reap_children(set(ended) - living.keys())
        found = [each for each in found if each.pid not in living]
        ending = doomed_orphans(found, living, known=self._known, has_ended=had_ended or self._has_ended)
        for pid in ending:
            kill_orphan(pid)
        self._known = {each.pid for each in found}.difference(ending)

    async def close(self) -> None:
        """Ends all orphans; called when every worker has ended or cannot be ended."""
        await call_in_thread(partial(end_orphans, frozenset(self._living()), ORPHANS_END_S))


@dataclass(slots=True)
class _Endings:
    """Addresses of processes that were killed, or retired."""

    killed: set[str] = field(default_factory=set)
    retired: set[str] = field(default_factory=set)


class Supervisor:
    """Manages the worker processes of one node."""

    def __init__(self, node: Node, events: EventLog) -> None:
        self._node, self._events = node, events
        self.exits: asyncio.Queue[tuple[Worker, str]] = asyncio.Queue()
        """Workers whose process ended without being ended by us, and how it ended."""
        self._tasks = Spawned()
        self._endings = _Endings()
        self._closing = False
        self.workers: dict[str, Worker] = {w.name: w for w in planned_workers(node)}
        self.shared_memory = SharedMemoryWatch(node.scratch, self._groups)
        self.orphans = OrphanWatch(self._groups)
        self.nurseries = Nurseries(node, events, self.workers, WorkerEnvironment(node), self._open_log)

    def of(self, role: str, slab: Slab) -> list[Worker]:
        """Returns the workers that hold `slab` when `role` holds it."""
        return [w for w in self.workers.values() if w.role == role and w.slab == slab]

    def work(self) -> int:
        """A counter that changes when a worker is started or makes progress; not when all are only alive."""
        return sum(worker.starts + worker.work for worker in self.workers.values())

    def by_address(self, address: str) -> Worker | None:
        """Returns the worker whose current process has this address on the workers' socket."""
        worker = self.workers.get(worker_name(address))
        return worker if worker is not None and worker.address == address and worker.is_running else None

    async def start(self, worker: Worker) -> None:
        """Starts its process, unless one runs. A failure to start is handled like the worker's death."""
        if worker.is_running or self._closing:
            return
        worker.begin()
        try:
            await self._begin(worker)
            if worker.process.child is None and not self._closing:
                self._not_started(worker, "was not started: its GPU set was taken back")
        except OSError as error:
            self._not_started(worker, f"could not be started: {error.strerror or error}")
        finally:
            worker.process.is_starting = False

    def _not_started(self, worker: Worker, how: str) -> None:
        self._events.emit(WorkerEnded(worker=worker.address, pid=0, how=how, log=""))
        self._tell_end(worker, how)

    async def _begin(self, worker: Worker) -> None:
        """Starts its process. Lack of processes or memory, and a filesystem that hangs, are treated as
        temporary.

        Raises:
            OSError: it cannot be started, or not within `launch.start_timeout_s`.
        """
        limit_s, pause_s = self._node.config.launch.start_timeout_s, FORK_FIRST_S
        until_s = clock.monotonic_s() + limit_s
        while not self._closing and not worker.process.is_unwanted:
            try:
                return await self._fork(worker, until_s)
            except OSError as error:
                if not is_passing(error) or clock.monotonic_s() + pause_s > until_s:
                    raise
                self._delayed(worker, f"{error.strerror or error}; trying again for up to {limit_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(FORK_MOST_S, 2 * pause_s)

    def _delayed(self, worker: Worker, why: str) -> None:
        self._events.emit(WorkerDelayed(worker=worker.address, error=why))
        _LOG.warning("%s cannot be started: %s", worker.name, why)

    async def _fork(self, worker: Worker, until_s: float) -> None:
        fork = await self.nurseries.fork_for(worker, until_s)
        log, output = await self._open_log(worker.address)
        if self._closing or worker.process.is_unwanted:
            os.close(output)
            return
        argv = [sys.executable, "-P", "-m", *worker.argv, "--worker", worker.address]
        program = ChildProgram(argv, self.nurseries.environment.of(worker))
        start = ChildStart(worker.name, program, output=output, log=log, fork=fork)
        worker.process.start = start
        try:
            worker.process.child = await self._begun(worker, start, until_s)
        finally:
            if worker.process.child is None:
                start.give_up()
                await asyncio.wait({start.over}, timeout=BEGIN_END_S)
            worker.process.start = None
        if fork is not None and start.not_forked is not None:
            self.nurseries.not_forked(worker, fork, start.not_forked)
        if child := worker.process.child:
            child.ended.add_done_callback(partial(self._ended, worker, child))
            self._events.emit(
                WorkerStarted(
                    worker=worker.address,
                    pid=child.pid,
                    log=str(log),
                    cpus=cpus_text(self.nurseries.environment.cpus_of(worker) or own_cpus()),
                    is_forked=start.pid is not None,
                )
            )
            if self._closing or worker.process.is_unwanted:
                child.signal_group(signal.SIGKILL)

    async def _begun(self, worker: Worker, start: ChildStart, until_s: float) -> Child | None:
        """Returns the child; None if it has not begun and is not wanted any more.

        Raises:
            OSError: it cannot be started, or has not begun at `until_s`.
        """
        tell_s = clock.monotonic_s() + BEGIN_QUIET_S
        while not self._closing and not worker.process.is_unwanted:
            done, _ = await asyncio.wait({start.begun}, timeout=BEGIN_LOOK_S)
            if done:
                return start.begun.result()
            now_s = clock.monotonic_s()
            if now_s > until_s:
                raise TimeoutError(errno.ETIMEDOUT, f"{sys.executable} does not begin")
            if now_s > tell_s:
                tell_s = math.inf
                self._delayed(
                    worker, f"{sys.executable} does not begin; waiting for up to {until_s - now_s:.0f} s"
                )
        return None

    async def _open_log(self, name: str) -> tuple[Path, int]:
        """Opens a process's log in the run folder, or in the scratch folder if that does not respond."""
        log = self._node.paths.log(self._node.attempt, name)
        try:
            async with asyncio.timeout(LOG_S):
                return log, await call_in_thread(partial(open_log, log))
        except (OSError, TimeoutError) as error:
            if isinstance(error, OSError) and error.errno == errno.EAGAIN:  # no thread is available
                raise
            log = self._node.scratch / "logs" / f"{name}.log"
            return log, open_log(log)

    async def ready(self, worker: Worker) -> None:
        """Waits for the worker's Hello.

        Raises:
            WorkerFailed: it ended before.
            DeadlineExceeded: it is silent for `launch.start_timeout_s`.
        """
        if worker.process.hello.is_set():
            return
        limit_s, starts = self._node.config.launch.start_timeout_s, worker.starts
        hello = asyncio.create_task(worker.process.hello.wait())
        try:
            for _ in range(max(1, int(limit_s * 5))):
                done, _ = await asyncio.wait({hello}, timeout=0.2)
                if done:
                    return
                if not worker.is_running or worker.starts != starts:
                    raise WorkerFailed(f"{worker.name} ended while starting. {await self.where(worker)}")
        finally:
            hello.cancel()
        where = await self.where(worker)
        raise DeadlineExceeded(f"{worker.name} did not come up in {limit_s:g} s. {where}")

    async def where(self, worker: Worker) -> str:
        """Returns the path of the log, with its end if the run folder responds."""
        log = self._node.paths.log(self._node.attempt, f"{worker.name}.{worker.starts}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOG_S):
                tail = await call_in_thread(partial(log_tail, log))
            return f"Its log is {log}; it ends:\n{tail}"
        return f"Its log is {log}; it could not be read just now."

    def waits(self, worker: Worker, error: str) -> None:
        """Records whether a worker waits for the checkpoint store; a change emits an event."""
        if error != worker.process.waits_for:
            worker.process.waits_for = error
            self._events.emit(StoreAwaited(who=worker.address, error=error))

    def was_killed(self, address: str) -> bool:
        """Whether a process that has ended did so by SIGKILL: from outside, if not by us."""
        return address in self._endings.killed

    def was_retired(self, address: str) -> bool:
        """Whether a process has ended, or was not begun, because it is not needed: nothing has failed."""
        return address in self._endings.retired

    async def retire(self, workers: Iterable[Worker]) -> None:
        """Ends processes that are not needed any more, also those that begin, and waits for their end."""
        retired = [(worker, worker.address) for worker in workers if worker.is_running]
        self._endings.retired |= {address for _, address in retired}
        for worker, _ in retired:
            worker.process.is_unwanted = True
        while left := [w for w, address in retired if w.is_running and w.address == address]:
            for worker in left:
                self.end(worker)
            await asyncio.sleep(RETIRED_LOOK_S)

    def end(self, worker: Worker) -> None:
        """Kills one worker's process group; its end is reported like any other."""
        if worker.process.child is not None:
            worker.process.child.signal_group(signal.SIGKILL)

    async def close(self, grace_s: float) -> None:
        """Ends every worker: END, then KILL after `grace_s`. Waits for their end; removes their leftovers."""
        self._closing = True
        await self.shared_memory.look()
        await asyncio.gather(self._end_all(grace_s), self.nurseries.close())  # some starts wait for one
        with contextlib.suppress(OSError):  # no thread is available: the launcher does it
            await self.orphans.close()
        await self.shared_memory.close()
        self.nurseries.environment.close()

    async def _end_all(self, grace_s: float) -> None:
        for number, patience_s in ((END, grace_s), (signal.SIGKILL, 10.0)):
            running = [w for w in self.workers.values() if w.is_running]
            for worker in running:
                if worker.process.child is not None:  # else its start is abandoned
                    worker.process.child.signal_group(number)
            for _ in range(int(patience_s / 0.05)):
                if not any(w.is_running for w in running):
                    return
                await asyncio.sleep(0.05)

    def _ended(self, worker: Worker, child: Child, ended: "asyncio.Future[int]") -> None:
        returncode = ended.result()
        is_begun = returncode != bound.NOT_STARTED
        how = describe_exit(returncode) if is_begun else "could not be started; its log says why"
        if worker.process.is_unwanted and returncode == -signal.SIGKILL:
            how = NOT_NEEDED
        if returncode == -signal.SIGKILL:
            self._endings.killed.add(worker.address)
        self._events.emit(WorkerEnded(worker=worker.address, pid=child.pid, how=how, log=str(child.log)))
        worker.process.child = None
        self._tell_end(worker, how)
        if not self._closing:  # else `close` does it
            self.orphans.worker_ended()
            self._tasks.spawn(self.shared_memory.ended(child.pid))

    def _tell_end(self, worker: Worker, how: str) -> None:
        if not self._closing:
            self.exits.put_nowait((worker, how))

    def _groups(self) -> dict[int, str]:
        """Returns the process groups of running workers, with the mark in their environment: also of those
        that begin, and of nurseries."""
        begun = {
            w.process.child.pid: self.nurseries.environment.mark_of(w)
            for w in self.workers.values()
            if w.process.child is not None
        }
        beginning = {
            start.pid: self.nurseries.environment.mark_of(w)
            for w in self.workers.values()
            if (start := w.process.start) is not None and start.pid is not None
        }
        return self.nurseries.marks() | beginning | begun
