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
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from yatt import clock
from yatt.adapters.files.patience import is_passing
from yatt.adapters.machine.affinity import cpus_text, own_cpus
from yatt.adapters.processes import bound
from yatt.adapters.processes.process import END, Child, ChildProgram, ChildStart, log_tail, open_log
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.gpus.processes.nurseries import Nurseries
from yatt.control.gpus.processes.orphans import OrphanWatch
from yatt.control.gpus.processes.shared_memory import SharedMemoryWatch
from yatt.control.gpus.processes.worker_environment import WorkerEnvironment
from yatt.control.gpus.processes.worker_plan import Worker, planned_workers
from yatt.control.node import Node
from yatt.core.attempts.exits import describe_exit
from yatt.core.gpus.placement import Slab
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.obs.story.events import EventLog

_LOG = logging.getLogger(__name__)
FORK_FIRST_S, FORK_MOST_S = 0.2, 2.0
BEGIN_LOOK_S, BEGIN_QUIET_S, BEGIN_END_S = 0.2, 5.0, 1.0
"""For a process that has not begun: the period of checks, the time until an event reports it, and the time
that its end may take after it is abandoned, unless it hangs in the kernel."""

LOG_S = 5.0
"""Longest time for the run folder to open a worker's log, or to read its end."""


class Supervisor:
    """Manages the worker processes of one node."""

    def __init__(self, node: Node, events: EventLog) -> None:
        self._node, self._events = node, events
        self.exits: asyncio.Queue[tuple[Worker, str]] = asyncio.Queue()
        """Workers whose process ended without being ended by us, and how it ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._killed: set[str] = set()
        self._closing = False
        self.workers: dict[str, Worker] = {w.name: w for w in planned_workers(node)}
        self.shared_memory = SharedMemoryWatch(node.scratch, self._groups)
        self.orphans = OrphanWatch(self._groups)
        self._environment = WorkerEnvironment(node)
        self.nurseries = Nurseries(node, events, self.workers, self._environment, self._open_log)
        self._beginning: dict[str, ChildStart] = {}

    def of(self, role: str, slab: Slab) -> list[Worker]:
        """Returns the workers that hold `slab` when `role` holds it."""
        return [w for w in self.workers.values() if w.role == role and w.slab == slab]

    def work(self) -> int:
        """A counter that changes when a worker is started or makes progress; not when all are only alive."""
        return sum(worker.starts + worker.work for worker in self.workers.values())

    def by_address(self, address: str) -> Worker | None:
        """Returns the worker whose current process has this address on the workers' socket."""
        worker = self.workers.get(address.rpartition(".")[0])
        return worker if worker is not None and worker.address == address and worker.is_running else None

    async def start(self, worker: Worker) -> None:
        """Starts its process, unless one runs. A failure to start is handled like the worker's death."""
        if worker.is_running or self._closing:
            return
        worker.starts += 1
        worker.hello.clear()
        worker.waits_for = ""
        worker.is_starting, worker.is_unwanted, worker.is_asleep = True, False, False
        worker.has_computed = False
        try:
            await self._begin(worker)
            if worker.child is None and not self._closing:
                self._not_started(worker, "was not started: its GPU set was taken back")
        except OSError as error:
            self._not_started(worker, f"could not be started: {error.strerror or error}")
        finally:
            worker.is_starting = False

    def _not_started(self, worker: Worker, how: str) -> None:
        self._events.emit("worker.end", worker=worker.address, pid=0, how=how, log="")
        self._tell_end(worker, how)

    async def _begin(self, worker: Worker) -> None:
        """Starts its process. Lack of processes or memory, and a filesystem that hangs, are treated as
        temporary.

        Raises:
            OSError: it cannot be started, or not within `launch.start_timeout_s`.
        """
        limit_s, pause_s = self._node.config.launch.start_timeout_s, FORK_FIRST_S
        until_s = clock.monotonic_s() + limit_s
        while not self._closing and not worker.is_unwanted:
            try:
                return await self._fork(worker, until_s)
            except OSError as error:
                if not is_passing(error) or clock.monotonic_s() + pause_s > until_s:
                    raise
                self._delayed(worker, f"{error.strerror or error}; trying again for up to {limit_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(FORK_MOST_S, 2 * pause_s)

    def _delayed(self, worker: Worker, why: str) -> None:
        self._events.emit("worker.delay", worker=worker.address, error=why)
        _LOG.warning("%s cannot be started: %s", worker.name, why)

    async def _fork(self, worker: Worker, until_s: float) -> None:
        fork = await self.nurseries.fork_for(worker, until_s)
        log, output = await self._open_log(worker.address)
        if self._closing or worker.is_unwanted:
            os.close(output)
            return
        argv = [sys.executable, "-P", "-m", *worker.argv, "--worker", worker.address]
        program = ChildProgram(argv, self._environment.of(worker))
        start = ChildStart(worker.name, program, output=output, log=log, fork=fork)
        self._beginning[worker.name] = start
        try:
            worker.child = await self._begun(worker, start, until_s)
        finally:
            if worker.child is None:
                start.give_up()
                await asyncio.wait({start.over}, timeout=BEGIN_END_S)
            del self._beginning[worker.name]
        if fork is not None and start.not_forked is not None:
            self.nurseries.not_forked(worker, fork, start.not_forked)
        if child := worker.child:
            child.ended.add_done_callback(partial(self._ended, worker, child))
            self._events.emit(
                "worker.start", worker=worker.address, pid=child.pid, log=str(log),
                cpus=cpus_text(self._environment.cpus_of(worker) or own_cpus()),
                is_forked=start.pid is not None,
            )  # fmt: skip
            if self._closing or worker.is_unwanted:
                child.signal_group(signal.SIGKILL)

    async def _begun(self, worker: Worker, start: ChildStart, until_s: float) -> Child | None:
        """Returns the child; None if it has not begun and is not wanted any more.

        Raises:
            OSError: it cannot be started, or has not begun at `until_s`.
        """
        tell_s = clock.monotonic_s() + BEGIN_QUIET_S
        while not self._closing and not worker.is_unwanted:
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
        if worker.hello.is_set():
            return
        limit_s, starts = self._node.config.launch.start_timeout_s, worker.starts
        hello = asyncio.create_task(worker.hello.wait())
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
        if error != worker.waits_for:
            worker.waits_for = error
            self._events.emit("store.wait", who=worker.address, error=error)

    def was_killed(self, address: str) -> bool:
        """Whether a process that has ended did so by SIGKILL: from outside, if not by us."""
        return address in self._killed

    def end(self, worker: Worker) -> None:
        """Kills one worker's process group; its end is reported like any other."""
        if worker.child is not None:
            worker.child.signal_group(signal.SIGKILL)

    async def close(self, grace_s: float, *, only_marked: bool = False) -> None:
        """Ends every worker: END, then KILL after `grace_s`. Waits for their end; removes their leftovers.

        Args:
            only_marked: see `OrphanWatch.close`.
        """
        self._closing = True
        await self.shared_memory.look()
        await asyncio.gather(self._end_all(grace_s), self.nurseries.close())  # some starts wait for one
        with contextlib.suppress(OSError):  # no thread is available: the launcher does it
            await self.orphans.close(only_marked=only_marked)
        await self.shared_memory.close()
        self._environment.close()

    async def _end_all(self, grace_s: float) -> None:
        for number, patience_s in ((END, grace_s), (signal.SIGKILL, 10.0)):
            running = [w for w in self.workers.values() if w.is_running]
            for worker in running:
                if worker.child is not None:  # else its start is abandoned
                    worker.child.signal_group(number)
            for _ in range(int(patience_s / 0.05)):
                if not any(w.is_running for w in running):
                    return
                await asyncio.sleep(0.05)

    def _ended(self, worker: Worker, child: Child, ended: "asyncio.Future[int]") -> None:
        returncode = ended.result()
        is_begun = returncode != bound.NOT_STARTED
        how = describe_exit(returncode) if is_begun else "could not be started; its log says why"
        if returncode == -signal.SIGKILL:
            self._killed.add(worker.address)
        self._events.emit("worker.end", worker=worker.address, pid=child.pid, how=how, log=str(child.log))
        worker.child = None
        self._tell_end(worker, how)
        if not self._closing:  # else `close` does it
            self.orphans.worker_ended()
            self._spawn(self.shared_memory.ended(child.pid))

    def _tell_end(self, worker: Worker, how: str) -> None:
        if not self._closing:
            self.exits.put_nowait((worker, how))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _groups(self) -> dict[int, str]:
        """Returns the process groups of running workers, with the mark in their environment: also of those
        that begin, and of nurseries."""
        begun = {
            w.child.pid: self._environment.mark_of(w) for w in self.workers.values() if w.child is not None
        }
        beginning = {
            start.pid: self._environment.mark_of(self.workers[name])
            for name, start in self._beginning.items()
            if start.pid is not None
        }
        return self.nurseries.marks() | beginning | begun
