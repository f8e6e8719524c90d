"""This node's media process: sends it orders, starts it again, and finds items that end or stop it.

An order whose process ends is sent again. After the second time its items are sent one by one, while no other
order is under way, so that an item which ends the process each time is found; only that one fails. Prepared
files outlive the process, so that nothing is made twice.
"""

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from yatt import clock
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.crowd import Spawned
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import MEDIA, Worker
from yatt.control.node import Node
from yatt.core.attempts.exits import describe_exit
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, DeadlineExceeded, WorkerFailed
from yatt.obs.story.events import EventLog
from yatt.records import message as m
from yatt.records.events.processes import MediaCallKilled, MediaRoomChosen
from yatt.records.media import MOST_ITEMS, media_name

SUSPECT = 2
"""Number of processes that may end during an order before its items are sent one by one."""

MEDIA_PATIENCE = 2
"""Number of processes that may end during an item alone before it fails."""

MEDIA_GRACE_S = 5.0
"""Time for an answer in addition to the limit of one item."""

WAIT_S = 1.0
"""Time between two tries of items that may be readable later."""

CROWDED_S = 0.1
"""The same, if the node's prepared files have no room until engines have opened some."""

PAUSE_S, MOST_PAUSE_S = 0.1, 30.0
"""Pause before the process is started again; it doubles, up to the second value."""

MOST_BROKEN_STARTS, MOST_KILLED_STARTS = 3, 8
"""Limits for starts in a row that do not come up; a killed process may not be at fault."""

_KILLED = describe_exit(-signal.SIGKILL)


class MediaEnded(Exception):
    """The process ended during an order; the text says how."""


class SharedTurn:
    """Lets orders run side by side, or one alone. Turns come in the order in which they were asked for."""

    def __init__(self) -> None:
        self._gate, self._idle, self._count = asyncio.Lock(), asyncio.Event(), 0

    @contextlib.asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        """Async context manager: others may run meanwhile."""
        async with self._gate:
            self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._idle.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Async context manager: begins when no other runs, and none begins meanwhile."""
        async with self._gate:
            while self._count:
                self._idle.clear()
                await self._idle.wait()
            yield


class MediaHost:
    """Runs the media process of one node.

    Args:
        channel: to this node's workers.
        failed: called with (error, exit code) for a failure that this node cannot recover from.
    """

    def __init__(
        self,
        node: Node,
        supervisor: Supervisor,
        channel: Channel,
        events: EventLog,
        failed: Callable[[str, int], None],
    ) -> None:
        self._node, self._supervisor, self._channel, self._events = node, supervisor, channel, events
        self._failed, self._turn = failed, SharedTurn()
        self._ends: Counter[str] = Counter()  # in a row: of processes, of starts
        self._cache_bytes = 0
        self._tasks = Spawned()

    async def prepare_media(self, items: tuple[m.MediaItem, ...]) -> m.MediaPrepared:
        """Has media prepared, at most `MOST_ITEMS`; each is in the answer's items or faults.

        What cannot be read now is tried again for `launch.phase_timeout_s`.

        Raises:
            WorkerFailed: the process cannot be started, or answers that something is wrong with it.
        """
        assert len(items) <= MOST_ITEMS, "callers send larger sets in parts"
        until_s = clock.monotonic_s() + self._node.config.launch.phase_timeout_s
        num_ended, is_crowded = 0, False
        while True:
            try:
                async with self._its_turn(is_alone=is_crowded):
                    answer = await self._order(items)
            except MediaEnded:
                num_ended += 1
                if num_ended >= SUSPECT:
                    return await self._one_by_one(items)
                continue
            waiting = [fault for fault in answer.faults if fault.waits]
            if not waiting or clock.monotonic_s() > until_s:
                return answer
            was_crowded, is_crowded = is_crowded, any(fault.is_crowded for fault in waiting)
            if was_crowded or not is_crowded:
                await asyncio.sleep(CROWDED_S if is_crowded else WAIT_S)

    def ended(self, worker: Worker, how: str) -> None:
        """Starts the process again after a pause, when it has ended."""
        if worker.process.hello.is_set():
            self._ends["starts"] = 0
        else:
            self._ends["starts"] += 1
            if self._ends["starts"] >= (MOST_KILLED_STARTS if how == _KILLED else MOST_BROKEN_STARTS):
                self._tasks.spawn(self._give_up(worker, how))
                return
        pause_s = min(MOST_PAUSE_S, PAUSE_S * 2.0 ** self._ends["processes"])
        self._ends["processes"] += 1
        self._tasks.spawn(self._start_again(worker, pause_s))

    async def _start_again(self, worker: Worker, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        await self._supervisor.start(worker)

    async def _give_up(self, worker: Worker, how: str) -> None:
        says = f"{worker.name} cannot start ({how}). {await self._supervisor.where(worker)}"
        self._failed(says, EXIT_USER_MISTAKE if how.startswith("exit code 2") else EXIT_FAILED)

    def _its_turn(self, *, is_alone: bool) -> AbstractAsyncContextManager[None]:
        return self._turn.alone() if is_alone else self._turn.beside_others()

    async def _one_by_one(self, items: tuple[m.MediaItem, ...]) -> m.MediaPrepared:
        """Finds the items that end the process; returns the others' answer and these faults."""
        faults, left = [], []
        async with self._turn.alone():
            for index, item in enumerate(items):
                how = await self._how_it_ends(item)
                if how:
                    says = f"{media_name(item)} ended the media process each time ({how})."
                    faults.append(m.MediaFault(index, says))
                else:
                    left.append(index)
            try:
                answer = await self._order(tuple(items[index] for index in left))
            except MediaEnded as error:
                raise WorkerFailed(
                    f"pictures that were prepared one by one fail together: {error}"
                ) from error
        return m.MediaPrepared(
            items=tuple(msgspec.structs.replace(each, index=left[each.index]) for each in answer.items),
            faults=(*faults, *(msgspec.structs.replace(f, index=left[f.index]) for f in answer.faults)),
            cache_bytes=answer.cache_bytes,
        )

    async def _how_it_ends(self, item: m.MediaItem) -> str:
        """Returns how the process ended each time that it had this item alone; empty if it did not."""
        how = ""
        for _ in range(MEDIA_PATIENCE):
            try:
                await self._order((item,))
            except MediaEnded as error:
                how = str(error)
            else:
                return ""
        return how

    async def _order(self, items: tuple[m.MediaItem, ...]) -> m.MediaPrepared:
        """Sends an order to the process that runs.

        Raises:
            MediaEnded: it ended, or was ended because it hung.
            WorkerFailed: it cannot be started, or answers that something is wrong with it.
        """
        worker = self._worker()
        await self._running(worker)
        address, limit_s = worker.address, self._node.config.media.timeout_s + MEDIA_GRACE_S
        try:
            answer = await self._channel.request(
                address, m.PrepareMedia(items=items), limit_s, is_probed=True
            )
        except WorkerFailed as error:
            raise MediaEnded(str(error)) from error
        except DeadlineExceeded as error:
            if self._supervisor.by_address(address) is worker:
                self._events.emit(MediaCallKilled(worker=address, limit_s=float(limit_s)))
                self._supervisor.end(worker)
                await self._gone(address)
            raise MediaEnded(f"{worker.name} made no progress for {limit_s:g} s") from error
        self._ends["processes"] = 0
        found = m.unless_failed(answer, worker.name)
        if self._cache_bytes and found.cache_bytes < self._cache_bytes:
            self._events.emit(MediaRoomChosen(cache_bytes=found.cache_bytes))
        self._cache_bytes = found.cache_bytes
        return found

    async def _running(self, worker: Worker) -> None:
        """Waits until a process accepts orders.

        Raises:
            WorkerFailed: none does within the limits of a start and of the pause before it.
        """
        limit_s = MOST_PAUSE_S + self._node.config.launch.start_timeout_s
        until_s = clock.monotonic_s() + limit_s
        while clock.monotonic_s() < until_s:
            if worker.is_running:
                with contextlib.suppress(WorkerFailed, DeadlineExceeded):  # `ended` starts another one
                    return await self._supervisor.ready(worker)
            await asyncio.sleep(0.1)
        raise WorkerFailed(f"{worker.name} was not started again within {limit_s:g} s")

    async def _gone(self, address: str) -> None:
        """Waits until a killed process has ended, so that the next order does not go to it; not for one that
        hangs in the kernel."""
        until_s = clock.monotonic_s() + MOST_PAUSE_S
        while self._supervisor.by_address(address) is not None and clock.monotonic_s() < until_s:
            await asyncio.sleep(0.05)

    def _worker(self) -> Worker:
        return next(w for w in self._supervisor.workers.values() if w.role == MEDIA)
