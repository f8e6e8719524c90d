"""Carries out the decisions of `yatt.core.lease` for each slab of one node.

The decisions are pure. This module has their effects: release requests, signals, memory checks. Tokens rise
within an attempt. Workers do not outlive their controller, so tokens of two attempts are never compared.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from yatt import clock
from yatt.adapters.deadline import while_moving
from yatt.adapters.process import END
from yatt.control.gpus.memory_check import memory_check_for
from yatt.control.gpus.supervisor import Supervisor
from yatt.control.gpus.worker_plan import Worker
from yatt.control.node import Node
from yatt.core import lease as rules
from yatt.core.lease import SlabLease, Stage, Timing
from yatt.core.liveness import AwakeClock
from yatt.core.placement import Slab
from yatt.errors import EXIT_FAILED, DeadlineExceeded, WorkerFailed
from yatt.obs.events import EventLog

TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Holding:
    """Functions by which the arbiter wakes workers and puts them to sleep. Each call may be repeated.

    Attributes:
        wake: wakes `role`'s workers on the slab under the token.
        sleep: orders them to sleep; returns when they sleep.
    """

    wake: Callable[[Slab, str, int], Awaitable[None]]
    sleep: Callable[[Slab, str, int], Awaitable[None]]


@dataclass(slots=True)
class _Watch:
    """Progress by worker of a slab's holder, from heartbeats since the lease's last renewal."""

    beats: dict[str, int] = field(default_factory=dict)


class Arbiter:
    """Manages the leases of one node's slabs.

    Args:
        failed: called with (error, exit code) for a failure that this node cannot recover from.
    """

    def __init__(
        self, node: Node, supervisor: Supervisor, events: EventLog, holding: Holding,
        failed: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._node, self._supervisor, self._events = node, supervisor, events
        self._holding, self._failed = holding, failed
        section = node.config.lease
        self._timing = Timing(
            ttl_s=section.ttl_s, stall_s=section.stall_s, release_s=section.release_s,
            term_s=section.term_s, kill_s=section.kill_s, memory_check_s=section.memory_check_s,
        )  # fmt: skip
        self._leases = {slab: SlabLease() for slab in node.slabs}
        self._watches = {slab: _Watch() for slab in node.slabs}
        self._awake: dict[Slab, int] = {}
        self._memory_check = memory_check_for(node, supervisor)
        self._doomed: set[str] = set()
        self._settling: dict[asyncio.Future[None], tuple[Slab, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock = AwakeClock(real_s=clock.monotonic_s())

    def lease(self, slab: Slab) -> SlabLease:
        """Returns the slab's current state."""
        return self._leases[slab]

    def is_awake(self, slab: Slab, role: str) -> bool:
        """Whether `role` holds the slab and its workers are awake under the current token."""
        lease = self._leases[slab]
        return lease.stage is Stage.HELD and lease.holder == role and self._awake.get(slab) == lease.token

    async def run(self) -> None:
        """Sends a tick to every lease, forever."""
        while True:
            self._clock = self._clock.tick(clock.monotonic_s(), period_s=TICK_S)
            for slab in self._leases:
                self._vouch_for_starting(slab)
                self._step(slab, rules.Tick())
            await asyncio.sleep(TICK_S)

    def want(self, slab: Slab, role: str) -> None:
        """Sets the role that is to hold the slab; '': no role."""
        if role != self._leases[slab].wanted:
            self._events.emit("lease.request", slab=slab.name, holder=role)
        self._step(slab, rules.Want(role))
        self._announce()  # who waits for another role is overtaken

    def give_back(self, slab: Slab, role: str, first: str) -> None:
        """Wants the role that the slab had first, unless something else is wanted in place of `role`
        already."""
        if self._leases[slab].wanted == role:
            self.want(slab, first)

    def renewed(self, worker: Worker, token: int, progress: int) -> None:
        """Handles a worker's heartbeat. The lease is renewed when all workers of the holder sent one."""
        slab = worker.slab
        if slab is None or not rules.is_live(self._leases[slab], token):
            return
        beats = self._watches[slab].beats
        beats[worker.name] = progress
        if all(w.name in beats for w in self._supervisor.of(worker.role, slab)):
            self._step(slab, rules.Beat(token, sum(beats.values())))
            beats.clear()

    def _vouch_for_starting(self, slab: Slab) -> None:
        """Renews the lease while a worker imports its libraries, for at most `launch.start_timeout_s`."""
        lease = self._leases[slab]
        workers = self._supervisor.of(lease.holder, slab)
        if lease.stage is Stage.HELD and any(w.is_running and not w.hello.is_set() for w in workers):
            self._step(slab, rules.Beat(lease.token, min(-2, lease.progress - 1)))

    def died(self, worker: Worker) -> None:
        """Handles the end of a worker. Its role has died on the slab when all its workers ended."""
        if worker.slab is None:
            return
        rest = [w for w in self._supervisor.of(worker.role, worker.slab) if w.is_running]
        if rest:  # a holder that lost one worker is killed as a whole
            self._signal(worker.slab, (worker.role,), signal.SIGKILL)
        if not rest:
            self._step(worker.slab, rules.Died(worker.role))

    async def settled(self, slab: Slab, role: str, deadline_s: float) -> bool:
        """Waits until the slab is free (role '') or `role` is awake on it; returns False if another role is
        wanted meanwhile.

        Raises:
            WorkerFailed: the slab is quarantined.
            DeadlineExceeded: neither happened, and there was no progress on this node for that long.
        """

        while not self._is_settled(slab, role):
            settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._settling[settled] = slab, role
            try:
                await while_moving(settled, deadline_s, self._supervisor.work)
            except TimeoutError:
                raise DeadlineExceeded(self._unsettled(slab, role, deadline_s)) from None
            finally:
                del self._settling[settled]
        if self._leases[slab].stage is Stage.QUARANTINED:
            raise WorkerFailed(f"slab {slab.name} is quarantined: {self._leases[slab].cause}")
        return self._leases[slab].wanted == role

    def _unsettled(self, slab: Slab, role: str, waited_s: float) -> str:
        lease = self._leases[slab]
        return (
            f"slab {slab.name}: '{role or 'nobody'}' does not hold it after {waited_s:g} s; it is "
            f"{lease.stage.value} by '{lease.holder}'. {lease.cause}"
        )

    def _is_settled(self, slab: Slab, role: str) -> bool:
        stage = self._leases[slab].stage
        if stage is Stage.QUARANTINED or self._leases[slab].wanted != role:
            return True
        return self.is_awake(slab, role) if role else stage is Stage.FREE

    def _step(self, slab: Slab, event: rules.Event) -> None:
        before = self._leases[slab]
        # The time during which the arbiter was suspended does not count.
        now_s = self._clock.at(clock.monotonic_s(), period_s=TICK_S)
        after, actions = rules.step(before, event, now_s, self._timing)
        self._leases[slab] = after
        if after.stage is not before.stage:
            self._note(slab, before, after)
        for action in actions:
            self._perform(slab, action)
        if after.stage is not before.stage:
            self._announce()

    def _note(self, slab: Slab, before: SlabLease, after: SlabLease) -> None:
        if after.stage is Stage.TERMINATED:
            self._events.emit(
                "lease.expire", slab=slab.name, holder=before.holder, token=before.token, cause=after.cause
            )
        elif before.stage in (Stage.HELD, Stage.RELEASING) and after.stage is Stage.CHECKING:
            self._events.emit("lease.release", slab=slab.name, holder=before.holder, token=before.token)

    def _perform(self, slab: Slab, action: rules.Action) -> None:
        match action:
            case rules.RequestRelease(role, token):
                self._spawn(self._release(slab, role, token))
            case rules.Give(role, token):
                self._events.emit("lease.grant", slab=slab.name, holder=role, token=token)
                self._watches[slab].beats.clear()
                self._spawn(self._wake(slab, role, token))
            case rules.Measure():
                self._prove(slab)
            case rules.Terminate(role):
                self._signal(slab, (role,), END)
            case rules.Kill(role):
                self._signal(slab, (role,), signal.SIGKILL)
            case rules.Purge(spare):
                roles = {worker.role for worker in self._memory_check.offenders(slab, spare)}
                self._signal(slab, tuple(sorted(roles)), signal.SIGKILL)
            case rules.Quarantine(cause):
                self._events.emit("lease.quarantine", slab=slab.name, cause=cause)
                # The trainer needs a shared slab in its phase, so the run cannot continue without it. An
                # engine node leaves the run.
                self._failed(f"slab {slab.name} is quarantined: {cause}", EXIT_FAILED)

    def _prove(self, slab: Slab) -> None:
        """Runs a memory check, and emits an event if memory is not free that should be."""
        checked = self._measure(slab)
        if not checked.clean and checked.detail != self._leases[slab].cause:
            self._events.emit("lease.not_free", slab=slab.name, cause=checked.detail)
        self._step(slab, checked)

    async def _release(self, slab: Slab, role: str, token: int) -> None:
        try:
            await self._holding.sleep(slab, role, token)
        except (WorkerFailed, DeadlineExceeded) as error:  # ticks escalate to termination
            self._events.emit("lease.refused", slab=slab.name, holder=role, token=token, error=str(error))
            return
        for worker in self._supervisor.of(role, slab):
            self._memory_check.learn(worker)
        self._step(slab, rules.Released(token))

    async def _wake(self, slab: Slab, role: str, token: int) -> None:
        await self._holding.wake(slab, role, token)
        if rules.is_live(self._leases[slab], token):
            self._awake[slab] = token
            self._announce()

    def _announce(self) -> None:
        """Completes the calls of `settled` whose condition is now true."""
        for settled, (slab, role) in self._settling.items():
            if not settled.done() and self._is_settled(slab, role):
                settled.set_result(None)

    def _signal(self, slab: Slab, roles: tuple[str, ...], number: signal.Signals) -> None:
        for role in roles:
            workers = [w for w in self._supervisor.of(role, slab) if w.is_running]
            for worker in workers:
                if worker.child is None:  # its start is abandoned; then it has ended
                    worker.is_unwanted = True
                    continue
                worker.child.signal_group(number)
                if number is signal.SIGKILL:
                    self._doomed.add(worker.address)
            if not workers:
                self._step(slab, rules.Died(role))

    def weigh(self, worker: Worker) -> int:
        """Returns the bytes that a worker uses now, measured as for this node's device."""
        return self._memory_check.weigh(worker)

    def _measure(self, slab: Slab) -> rules.MemoryChecked:
        dying = [w for w in self._supervisor.workers.values() if w.slab == slab and w.address in self._doomed]
        if any(w.is_running for w in dying):
            return rules.MemoryChecked(False, f"{', '.join(w.name for w in dying)} is being killed")
        return self._memory_check.check(slab, self._leases[slab].wanted)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
