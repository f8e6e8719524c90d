"""The dead-man's switch of one controller on Slurm; the rules are in `yatt.core.attempts.deadman`.

The leader increments its heartbeat, a counter in the shared folder. Every other controller watches this
counter and the messages of the leader.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from yatt import clock
from yatt.adapters.files.files import make_within, read_or_none, sealed_record, unsealed_any, write_atomically
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.run_folder.ledger import STARTED, newest_attempt, record_of_attempt
from yatt.adapters.slurm.requeue import Requeue
from yatt.control.node import Node
from yatt.core.attempts import deadman as rules
from yatt.core.attempts.deadman import Action
from yatt.errors import StaleAttempt
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths
from yatt.records.events.attempts import JobRequeued

_LOG = logging.getLogger(__name__)
HEARTBEAT_S = 3.0
LOOK_S = 1.0
QUIET_S = 3.0
"""Silence of the leader's connection from which on its heartbeat is read: otherwise 512 nodes would open one
file 500 times a second. So a dead leader is noticed that much later than after `Limits.silence_s`."""

RETRY_S = 2.0


async def write_heartbeat(paths: RunPaths, attempt: int, period_s: float = HEARTBEAT_S) -> None:
    """Writes the leader's heartbeat, forever. The counter rises only while the leader's event loop runs.

    A heartbeat that cannot be written is logged and skipped: messages still show that the leader is alive.
    """
    path = paths.heartbeat(attempt)
    for counter in itertools.count(1):
        try:
            await call_in_thread(partial(make_within, paths.root, path.parent))
            await call_in_thread(
                partial(write_atomically, path, sealed_record({"counter": counter}, attempt))
            )
        except OSError as error:
            _LOG.warning("the leader's heartbeat cannot be written: %s", error)
        await asyncio.sleep(period_s)


@dataclass(slots=True)
class DeadMan:
    """The dead-man's switch of a controller other than the leader.

    Attributes:
        connection_silence_s: returns the seconds since the leader's last message.
    """

    node: Node
    requeue: Requeue
    events: EventLog
    connection_silence_s: Callable[[], float]
    limits: rules.Limits = field(default_factory=rules.Limits)
    _told_s: float = 0.0

    async def run(self) -> None:
        """Watches the leader; never returns, and raises when this start is over.

        Raises:
            StaleAttempt: another start exists or was requested.
        """
        observer = rules.Observer(moved_s=clock.monotonic_s())
        while True:
            await asyncio.sleep(LOOK_S)
            silence_s = self.connection_silence_s()
            counter = await self._counter() if silence_s >= QUIET_S else None
            tick = rules.Look(clock.monotonic_s(), silence_s, counter)
            observer, action = rules.step(observer, tick, self.limits)
            while action is not Action.NOTHING:
                _LOG.warning("dead-man's switch: %s, %s", observer.stage.value, action.value)
                event = await self._do(action, observer)
                observer, action = rules.step(observer, event, self.limits)

    async def _counter(self) -> int | None:
        """The leader's heartbeat; 0 if there is none yet; None if the shared folder cannot be read."""
        counter: int | None = await call_in_thread(self._read)
        return counter

    def _read(self) -> int | None:
        try:
            return self._read_heartbeat()
        except OSError as error:
            _LOG.warning("the run folder cannot be read: %s", error)
            return None

    def _read_heartbeat(self) -> int | None:
        paths, attempt = self.node.paths, self.node.attempt
        heartbeat = unsealed_any(read_or_none(paths.heartbeat(attempt)))
        if heartbeat is not None:
            return int(heartbeat["counter"])
        return 0 if record_of_attempt(paths, attempt, STARTED) else None

    async def _do(self, action: Action, observer: rules.Observer) -> rules.Event:
        match action:
            case Action.ASK_SLURM:
                if not await call_in_thread(self.requeue.can_ask):
                    raise StaleAttempt(
                        "the leader is gone, and without scontrol nobody can be asked for more"
                    )
                said = await call_in_thread(self.requeue.state)
                self._told_s = clock.monotonic_s()
                return rules.SlurmSaid(said)
            case Action.CLAIM:
                return rules.ClaimTried(await call_in_thread(partial(self.requeue.claim, observer.claim)))
            case Action.REQUEUE:
                await self._requeue()
                return rules.RequeueReturned()
            case _:
                raise StaleAttempt("the leader is gone, and this start of the job is over")

    async def _requeue(self) -> None:
        """Requests the next start; does nothing if Slurm's answer is old or a newer start exists."""
        node = self.node
        if newest_attempt(node.paths) > node.attempt:
            raise StaleAttempt("a newer start of the job exists")
        if not rules.is_fresh(self._told_s, clock.monotonic_s(), self.limits):
            return
        leader = unsealed_any(read_or_none(node.paths.controller_record(node.attempt, 0))) or {}
        exclude = [str(leader["slurm_node"])] if leader.get("slurm_node") else []
        reply = await call_in_thread(partial(self.requeue.succeed, exclude, dict(os.environ)))
        self.events.emit(JobRequeued(by=node.name, reason="the leader is gone", code=reply.code))
        _LOG.warning("requeue of job %s: %s", self.requeue.job_id, reply.says)
        if reply.code != 0:
            await asyncio.sleep(RETRY_S)
        elif reply.out:  # only this ends the start, and the successor job begins after it
            await call_in_thread(partial(self.requeue.slurm.call, "scancel", self.requeue.job_id))
