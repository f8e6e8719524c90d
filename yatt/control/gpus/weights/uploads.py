"""This node's uploader: uploads snapshots in the background, and copies them out before they change.

A slow store costs no training: before the trainers change their host copies, the uploader copies out what it
has not uploaded yet. That time is back-pressure, and is reported as an event.
"""

import asyncio
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from yatt import clock
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.crowd import Spawned
from yatt.adapters.node_local.host_segment import AREAS, WEIGHTS
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import UPLOADER, Worker
from yatt.control.node import Node
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.obs.story.events import EventLog
from yatt.records import message as m
from yatt.records.events.saves import LocalFilesLacking, StoreTooSlow, UploadLost

A = TypeVar("A", bound=m.Message)
MOST_TRIES = 4
"""Number of uploader processes that one order may outlive."""

DETACH_S = 60.0
"""Longest time without progress for an uploader to copy aside what it has not uploaded."""

RESTART_S, MOST_RESTART_S = 0.5, 30.0
"""Pause before an uploader is started again; it doubles, up to the second value."""


class Uploads:
    """Sends orders to the uploader of a trainer node.

    Args:
        channel: to this node's workers.
    """

    def __init__(self, node: Node, supervisor: Supervisor, channel: Channel, events: EventLog) -> None:
        self._node, self._supervisor, self._channel, self._events = node, supervisor, channel, events
        self._running: m.Upload | None = None
        self._num_ended = 0
        self._tasks = Spawned()

    async def upload(self, wanted: m.Upload) -> m.Uploaded:
        """Uploads the snapshots of this node's trainer ranks.

        Raises:
            WorkerFailed: the snapshots have changed, the store does not take them, or the uploader ended too
                often.
            DeadlineExceeded: there was no progress.
        """
        node = self._node
        first = node.placement.first_rank(node.index)
        count = sum(len(slab.gpus) for slab in node.slabs)
        stems = tuple(str(host_stem(node, rank)) for rank in range(first, first + count))
        order = self._running = structs.replace(wanted, stems=stems)
        try:
            uploaded = await self._order(order)
        except DeadlineExceeded:  # it hangs: the next save needs one that works
            self._supervisor.end(self._worker())
            raise
        finally:
            if self._running is order:
                self._running = None
        if uploaded.local_fault:
            self._events.emit(LocalFilesLacking(iteration=order.iteration, error=uploaded.local_fault))
        return uploaded

    async def publishing(self, version: int) -> None:
        """Frees what will change before the next save, because this version is published: the weights, and if
        the trainers sleep the state."""
        placement = self._node.placement
        sleeps = any(len(placement.roles_of(slab)) > 1 for slab in self._node.slabs)
        await self.detach(version, AREAS if sleeps else (WEIGHTS,))

    async def detach(self, version: int, areas: tuple[str, ...] = AREAS) -> None:
        """Frees the host copies for a change to this version. If that fails, the save fails by itself: its
        bytes have another stamp then."""
        running, worker = self._running, self._worker()
        if running is None or running.iteration == version:
            return
        began_s = clock.monotonic_s()
        try:
            if not (worker.is_running and worker.process.hello.is_set()):
                raise WorkerFailed(f"{worker.name} is being started again")
            answer = await self._channel.request(
                worker.address, m.Detach(areas=areas), DETACH_S, is_probed=True
            )
            copied = m.unless_failed(answer, worker.name).size_bytes
        except (WorkerFailed, DeadlineExceeded) as error:
            self._events.emit(UploadLost(iteration=running.iteration, error=str(error)))
            return
        if copied:
            self._events.emit(
                StoreTooSlow(
                    iteration=running.iteration,
                    size_bytes=copied,
                    seconds=round(clock.monotonic_s() - began_s, 6),
                )
            )

    def ended(self, worker: Worker) -> None:
        """Starts the uploader again after a pause, when its process has ended."""
        pause_s = min(MOST_RESTART_S, RESTART_S * 2.0**self._num_ended)
        self._num_ended += 1

        async def start() -> None:
            await asyncio.sleep(pause_s)
            await self._supervisor.start(worker)

        self._tasks.spawn(start())

    async def _order(self, body: m.Order[A]) -> A:
        """Sends an order; sends it again if the process ended."""
        worker, limit_s = self._worker(), self._node.config.launch.phase_timeout_s
        for left in reversed(range(MOST_TRIES)):
            if not worker.is_running:  # nobody has its address until it is started again
                await self._restarted(worker)
            try:
                await self._supervisor.ready(worker)
                answer = await self._channel.request(worker.address, body, limit_s, is_probed=True)
            except WorkerFailed:  # its process ended
                if not left:
                    raise
                await self._restarted(worker)
            else:
                self._num_ended = 0
                return m.unless_failed(answer, worker.name)
        raise AssertionError("the last try returns or raises")

    async def _restarted(self, worker: Worker) -> None:
        """Waits until its next process is being started."""
        limit_s = MOST_RESTART_S + self._node.config.launch.start_timeout_s
        for _ in range(int(limit_s / 0.1)):
            if worker.is_running:
                return
            await asyncio.sleep(0.1)
        raise WorkerFailed(f"{worker.name} was not started again within {limit_s:g} s")

    def _worker(self) -> Worker:
        return next(w for w in self._supervisor.workers.values() if w.role == UPLOADER)


def host_stem(node: Node, rank: int) -> Path:
    """Path of the host copy of a trainer rank."""
    return node.weights_root / f"rank-{rank:05d}"
