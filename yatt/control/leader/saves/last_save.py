"""The last save of an attempt whose time is limited: to the store, or to the disks of the trainer nodes.

`yatt.core.phases.time_left` decides. A save to the disks ends in a local commit, which the next start
uploads.
"""

import asyncio
import math
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec

from yatt import clock
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.local.local_commits import LocalCommits
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.node_clients import NodeClients
from yatt.control.node import Node
from yatt.core.phases.time_left import MOST_RATES, SaveTarget, Speeds, Transfer, is_given_up, target_of
from yatt.errors import YattError
from yatt.obs.story.events import EventLog
from yatt.records import message as m
from yatt.records.events.saves import CheckpointKeptLocally

T = TypeVar("T")
LOOK_S = 0.2


class TooLate(Exception):
    """An upload would end too late, and was given up."""


class LastSave:
    """Measures saves, and makes the one that the store has no time for.

    Args:
        inbox: has the time of the end.
    """

    def __init__(self, node: Node, clients: NodeClients, events: EventLog, inbox: Inbox) -> None:
        self._node, self._clients, self._events, self._inbox = node, clients, events, inbox
        self._commits = LocalCommits(node.paths, node.config.run.id)
        self._uploads: list[Transfer] = []
        self._local: list[Transfer] = []
        self._has_local = bool(node.config.checkpoint.local_dir)
        self._was_too_late = False

    def measured(self, size_bytes: int, seconds: float, nodes: list[m.Uploaded]) -> None:
        """Notes an upload, and what the local disks took meanwhile."""
        self._uploads = [*self._uploads, Transfer(size_bytes, seconds)][-MOST_RATES:]
        has_tier = bool(self._node.config.checkpoint.local_dir)
        self._has_local = has_tier and not any(node.local_fault for node in nodes)
        if self._has_local:
            slowest = Transfer(size_bytes, max(node.local_s for node in nodes))
            self._local = [*self._local, slowest][-MOST_RATES:]

    def target(self, size_bytes: int) -> SaveTarget:
        """Returns where a save of this size goes that begins now."""
        if self._was_too_late:  # a second upload would be given up as well
            return SaveTarget.LOCAL if self._has_local else SaveTarget.STORE
        return target_of(size_bytes, self._left_s, self._speeds)

    async def in_time(self, upload: Coroutine[Any, Any, T], size_bytes: int) -> T:
        """Awaits an upload, unless `yatt.core.phases.time_left` gives it up.

        Raises:
            TooLate: it was given up.
        """
        task, began_s = asyncio.ensure_future(upload), clock.monotonic_s()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                waited_s = clock.monotonic_s() - began_s
                is_late = is_given_up(size_bytes, self._left_s, waited_s, self._speeds)
                if is_late and not task.done():
                    self._was_too_late = True
                    raise TooLate
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def keep(self, prefix: str, draft: Manifest, committed: str) -> Manifest:
        """Makes a local commit.

        Raises:
            WorkerFailed | OSError: a disk or the run folder fails; the next save goes to the store.
        """
        began_s = clock.monotonic_s()
        order = m.Upload(iteration=draft.iteration, url=prefix, committed=committed, is_local=True)
        try:
            nodes = await self._clients.ask_trainer_nodes(order)
            manifest = whole_manifest(draft, nodes)
            hosts = tuple(node.host for node in nodes)
            await call_in_thread(partial(self._commits.commit, manifest, hosts))
        except (YattError, OSError):
            self._has_local = False
            raise
        self._events.emit(
            CheckpointKeptLocally(
                iteration=draft.iteration,
                size_bytes=sum(f.size_bytes for f in manifest.files),
                seconds=round(clock.monotonic_s() - began_s, 6),
            )
        )
        return manifest

    def committed(self, iteration: int) -> None:
        """Removes the records of local commits that the store has overtaken. Blocks.

        Raises:
            OSError: the run folder fails.
        """
        self._commits.remove_until(iteration, self._node.attempt)

    @property
    def _left_s(self) -> float:
        ends_s = self._inbox.ends_s
        return ends_s - clock.monotonic_s() if math.isfinite(ends_s) else math.inf

    @property
    def _speeds(self) -> Speeds:
        return Speeds(
            uploads=self._uploads,
            local=self._local,
            num_nodes=len(self._node.placement.trainer_nodes),
            has_local=self._has_local,
        )


def whole_manifest(draft: Manifest, nodes: list[m.Uploaded]) -> Manifest:
    """Returns the manifest with the files of all nodes."""
    return msgspec.structs.replace(
        draft,
        files=tuple(file for node in nodes for file in node.files),
        nodes=tuple(node.state for node in nodes),
    )
