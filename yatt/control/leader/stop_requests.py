"""Requests for an early end: signals, and the file that the launcher and `yatt cancel` write."""

import asyncio
import logging
import math
from functools import partial

from yatt.adapters.net.crowd import Spawned
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.run_folder.ledger import STOP, record_of_attempt, write_record
from yatt.control.leader.inbox import Inbox
from yatt.control.node import Node
from yatt.core.attempts.outcome import BY_HAND
from yatt.errors import YattError
from yatt.obs.story.events import EventLog
from yatt.records.events.attempts import SignalSeen

_LOG = logging.getLogger(__name__)
CHECK_S = 0.25


class StopRequests:
    """Puts stop requests into the leader's inbox. Other controllers ignore them and quit on its order."""

    def __init__(self, node: Node, events: EventLog, inbox: Inbox | None) -> None:
        self._node, self._events, self._inbox = node, events, inbox
        self._tasks = Spawned()

    def signal(self, reason: str, left_s: float = math.inf) -> None:
        """Handles a request for an early end, by a signal or by the file. `left_s`: time until it is ended by
        force."""
        if self._inbox is not None:
            self._events.emit(SignalSeen(name=reason))
            self._inbox.stop(reason, left_s)

    def signal_by_hand(self) -> None:
        """Handles a signal that a person sent to the steps; Slurm sends it only to the batch script. The
        launcher has not received it, and needs the note to request the next start."""
        self.signal(BY_HAND)
        if self._inbox is not None:
            self._tasks.spawn(self._note(BY_HAND))

    async def _note(self, reason: str) -> None:
        node = self._node
        try:
            noted = await call_in_thread(partial(record_of_attempt, node.paths, node.attempt, STOP))
            if not noted:  # else it is a cancel, which stays one
                await call_in_thread(
                    partial(write_record, node.paths, node.attempt, STOP, {"reason": reason})
                )
        except (OSError, YattError) as error:  # the run stops anyway, and counts as failed
            _LOG.warning("the launcher is not told of the signal: %s", error)

    async def watch(self) -> None:
        """Looks for the file, forever."""
        node, told = self._node, ""
        while True:
            try:
                found = await call_in_thread(partial(record_of_attempt, node.paths, node.attempt, STOP))
            except OSError:  # read again later
                found = {}
            if found and found["reason"] != told:
                told = str(found["reason"])
                left_s = found.get("left_s")
                self.signal(told, float(left_s) if type(left_s) in (int, float) else math.inf)
            await asyncio.sleep(CHECK_S)
