"""Nodes that leave a running attempt, and join it again: the leader's part."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from functools import partial
from typing import Any

from yatt.adapters.files import make_within, publish, sealed
from yatt.adapters.patience import LIMIT_S, patiently
from yatt.adapters.thread_call import call_in_thread
from yatt.control.leader.background import Background
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.slabs import Slabs
from yatt.control.node import Node
from yatt.core import phases
from yatt.core.phases import Phase
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.obs.events import EventLog

_LOG = logging.getLogger(__name__)
RECORD_S = 20.0
"""Longest time to write the record of a lost node; then the attempt ends without it."""


class Members:
    """Carries out what `yatt.core.phases` decides about nodes."""

    def __init__(
        self, node: Node, clients: NodeClients, slabs: Slabs, events: EventLog, background: Background
    ) -> None:
        self._node, self._clients, self._events, self._background = node, clients, events, background
        self._slabs = slabs
        self._inbox = background.inbox
        self._writing: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def perform(self, action: phases.Exclude | phases.Prepare | phases.Admit) -> None:
        """Carries out one action. Only the record of a loss that ends the attempt is waited for."""
        match action:
            case phases.Exclude():
                await self._exclude(action)
            case phases.Prepare():
                self._background.spawn(self._prepare(action))
            case phases.Admit():
                self._admit(action)

    async def _exclude(self, lost: phases.Exclude) -> None:
        """Excludes a process of a node everywhere, and writes a record for the start of the next attempt."""
        await self._clients.exclude(lost.node, lost.life, lost.why)
        self._slabs.gone(lost.node)
        silence_s = round(self._inbox.silences.get(lost.node, 0.0), 3)
        _LOG.warning("node%d %s; the run %s", lost.node, lost.why, "goes on" if lost.goes_on else "ends")
        content = {
            "node": lost.node, "life": lost.life, "silence_s": silence_s, "why": lost.why,
            "goes_on": lost.goes_on,
        }  # fmt: skip
        self._events.emit("node.lost", **content)
        if lost.goes_on:
            self._background.spawn(self._write(lost.node, content))
        else:  # the start of the next attempt reads it
            with contextlib.suppress(TimeoutError):  # else the next attempt detects it
                async with asyncio.timeout(2 * RECORD_S):
                    await self._write(lost.node, content, limit_s=RECORD_S)

    async def _prepare(self, newcomer: phases.Prepare) -> None:
        """Lets a newcomer start its workers. If it fails, it is lost again, and nothing else is."""
        index, life = newcomer.node, newcomer.life
        _LOG.info("node%d has come back (life %d) and starts its workers", index, life)
        self._background.spawn(self._write(index, _returned(index, life, "preparing")))
        try:
            holders = self._slabs.holders_on(index, Phase.PUBLISH)
            await self._clients.prepare(index, life, holders)
        except (WorkerFailed, DeadlineExceeded) as error:
            self._inbox.gave_up(index, life, str(error))
        else:
            self._inbox.put(phases.NodeReady(index, life))

    def _admit(self, newcomer: phases.Admit) -> None:
        index, life = newcomer.node, newcomer.life
        self._clients.admit(index, life)
        self._slabs.back(index)
        self._background.spawn(self._clients.introduce(index, life))
        self._events.emit("node.joined", node=index, life=life)
        self._background.spawn(self._write(index, _returned(index, life, "joined")))

    async def _write(self, index: int, content: dict[str, Any], limit_s: float = LIMIT_S) -> None:
        """Writes the record of a node's loss, or of its return. Without it the run goes on: only processes
        that are over, steps and launchers read it. Records of one node are written one after the other."""
        node = self._node
        record = node.paths.lost(node.attempt, index)

        def write() -> None:
            make_within(node.paths.root, record.parent)
            publish(record, sealed(content, node.attempt))

        try:
            async with self._writing[index]:
                await call_in_thread(partial(patiently, write, limit_s=limit_s))
        except OSError as error:
            _LOG.warning("%s is not written: %s", record, error)


def _returned(index: int, life: int, state: str) -> dict[str, Any]:
    """Returns the record of a node whose later life is 'preparing' or has 'joined'."""
    why = "ended, and was started again"
    return {"node": index, "life": life - 1, state: life, "goes_on": True, "why": why}
