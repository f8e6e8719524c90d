"""Carries out the decisions of `yatt.core.gpus.lease` and `yatt.core.gpus.shared_slab` for each slab of one
node.

The decisions are pure. This module has their effects: release requests, signals, memory checks, and waits
until a slab is free or held by the wanted role (`Settling`). Tokens rise
within an attempt. Workers do not outlive their controller, so tokens of two attempts are never compared.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from yatt import clock
from yatt.adapters.net.crowd import Spawned
from yatt.adapters.net.deadline import while_moving
from yatt.adapters.processes.process import END
from yatt.control.gpus.memory_check import SlabProcesses
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.control.node import Node
from yatt.core.gpus import lease as rules, shared_slab as sharing
from yatt.core.gpus.lease import SlabLease, Stage, Timing
from yatt.core.gpus.placement import TRAINER, Slab
from yatt.core.gpus.shared_slab import ForEngine, OfEngine, SharedSlab
from yatt.core.requests.liveness import AwakeClock
from yatt.errors import EXIT_FAILED, DeadlineExceeded, WorkerFailed
from yatt.obs.story.events import EventLog
from yatt.records.events.slabs import (
    EngineExpired,
    LeaseExpired,
    LeaseGranted,
    LeaseRefused,
    LeaseReleased,
    MemoryNotFree,
    SlabQuarantined,
)

TICK_S = 0.1
LEAST_MOVED_BYTES_PER_S = 1 << 30
"""Slowest rate at which a holder moves its memory to the host when it falls asleep, if every page is
allocated and locked for it anew, as vLLM does for weights that it keeps (2 to 5 GB/s; not measured by us)."""


class Settling:
    """The waits for one node's slabs.

    Args:
        lease: returns a slab's state.
        is_awake: whether a role holds a slab and its workers are awake.
        work: returns the progress of this node's workers.
    """

    def __init__(
        self,
        lease: Callable[[Slab], SlabLease],
        is_awake: Callable[[Slab, str], bool],
        work: Callable[[], int],
    ) -> None:
        self._lease, self._is_awake, self._work = lease, is_awake, work
        self._waiting: dict[asyncio.Future[None], tuple[Slab, str]] = {}

    async def wait(self, slab: Slab, role: str, deadline_s: float) -> bool:
        """Waits until the slab is free (role '') or `role` is awake on it; returns False if another role is
        wanted meanwhile.

        Raises:
            WorkerFailed: the slab is quarantined.
            DeadlineExceeded: neither happened, and there was no progress on this node for that long.
        """
        while not self._is_over(slab, role):
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[over] = slab, role
            try:
                await while_moving(over, deadline_s, self._work)
            except TimeoutError:
                raise DeadlineExceeded(self._late(slab, role, deadline_s)) from None
            finally:
                del self._waiting[over]
        lease = self._lease(slab)
        if lease.stage is Stage.QUARANTINED:
            raise WorkerFailed(f"GPU set {slab.name} is quarantined: {lease.cause}")
        return lease.wanted == role

    def announce(self) -> None:
        """Ends the waits whose condition is now true."""
        for over, (slab, role) in self._waiting.items():
            if not over.done() and self._is_over(slab, role):
                over.set_result(None)

    def _is_over(self, slab: Slab, role: str) -> bool:
        lease = self._lease(slab)
        if lease.stage is Stage.QUARANTINED or lease.wanted != role:
            return True
        return self._is_awake(slab, role) if role else lease.stage is Stage.FREE

    def _late(self, slab: Slab, role: str, waited_s: float) -> str:
        lease = self._lease(slab)
        return (
            f"GPU set {slab.name}: '{role or 'nobody'}' does not hold it after {waited_s:g} s; it is "
            f"{lease.stage.value} by '{lease.holder}'. {lease.cause}"
        )


@dataclass(frozen=True, slots=True)
class Holding:
    """Functions by which the arbiter wakes workers and puts them to sleep. Each call may be repeated.

    Attributes:
        wake: wakes `role`'s workers on the slab under the token.
        sleep: orders them to sleep within the time limit (seconds); returns when all that run sleep.
        restart: starts and wakes one engine of several under the token, which others of its role work under.
        take_back: called before anything else when a grant ends; no worker may be woken under it any more.
    """

    wake: Callable[[Slab, str, int], Awaitable[None]]
    sleep: Callable[[Slab, str, int, float], Awaitable[None]]
    restart: Callable[[Worker, int], Coroutine[Any, Any, None]]
    take_back: Callable[[Slab], None]


@dataclass(slots=True)
class _ManagedSlab:
    """One slab.

    Attributes:
        shared: its lease, and those of several engines on it.
        timing: of its lease; the limit of a release is set anew for each.
        num_engines: by role.
        beats: progress by worker of the holder, from heartbeats since the lease's last renewal.
        ended_before: by worker, the starts that had ended before the grant.
        awake: token under which the holder's workers are awake.
    """

    timing: Timing
    num_engines: Mapping[str, int]
    shared: SharedSlab = field(default_factory=SharedSlab)
    beats: dict[str, int] = field(default_factory=dict)
    ended_before: dict[str, int] = field(default_factory=dict)
    awake: int | None = None


class Arbiter:
    """Manages the leases of one node's slabs.

    Args:
        failed: called with (error, exit code) for a failure that this node cannot recover from.
    """

    def __init__(
        self,
        node: Node,
        supervisor: Supervisor,
        events: EventLog,
        holding: Holding,
        failed: Callable[[str, int], None],
    ) -> None:
        self._node, self._supervisor, self._events = node, supervisor, events
        self._holding, self._failed = holding, failed
        section = node.config.lease
        timing = Timing(
            ttl_s=section.ttl_s,
            stall_s=section.stall_s,
            release_s=section.release_s,
            term_s=section.term_s,
            kill_s=section.kill_s,
            memory_check_s=section.memory_check_s,
        )
        num_engines = node.placement.num_engines_on
        self._slabs = {slab: _ManagedSlab(timing, num_engines(slab)) for slab in node.slabs}
        self._processes = SlabProcesses(node, supervisor)
        self._settling = Settling(self.lease, self.is_awake, supervisor.work)
        self._tasks = Spawned()
        self._clock = AwakeClock(real_s=clock.monotonic_s())

    def lease(self, slab: Slab) -> SlabLease:
        """Returns the slab's current state."""
        return self._slabs[slab].shared.lease

    def is_awake(self, slab: Slab, role: str) -> bool:
        """Whether `role` holds the slab and its workers are awake under the current token."""
        lease = self.lease(slab)
        return lease.stage is Stage.HELD and lease.holder == role and self._slabs[slab].awake == lease.token

    async def run(self) -> None:
        """Sends a tick to every lease, forever."""
        while True:
            self._clock = self._clock.tick(clock.monotonic_s(), period_s=TICK_S)
            for slab in self._slabs:
                self._vouch_for_starting(slab)
                self._step(slab, rules.Tick())
            await asyncio.sleep(TICK_S)

    def want(self, slab: Slab, role: str) -> None:
        """Sets the role that is to hold the slab; '': no role."""
        self._step(slab, rules.Want(role))
        self._settling.announce()  # who waits for another role is overtaken

    def give_back(self, slab: Slab, role: str, first: str) -> None:
        """Wants the role that the slab had first, unless something else is wanted in place of `role`
        already."""
        if self.lease(slab).wanted == role:
            self.want(slab, first)

    def renewed(self, worker: Worker, token: int, progress: int) -> None:
        """Handles a worker's heartbeat. It renews the lease of its engine, if the holder has several. Else
        the slab's lease is renewed when all workers of the holder sent one."""
        slab = worker.slab
        if slab is None or not rules.is_live(self.lease(slab), token):
            return
        workers = self._supervisor.of(worker.role, slab)
        if self._slabs[slab].shared.engines:
            self._step(slab, OfEngine(workers.index(worker), rules.Beat(token, progress)))
            return
        beats = self._slabs[slab].beats
        beats[worker.name] = progress
        if all(w.name in beats for w in workers):
            self._step(slab, rules.Beat(token, sum(beats.values())))
            beats.clear()

    def _vouch_for_starting(self, slab: Slab) -> None:
        """Renews a lease while a worker imports its libraries, for at most `launch.start_timeout_s`."""
        state = self._slabs[slab].shared
        if state.lease.stage is not Stage.HELD:
            return
        for index, worker in enumerate(self._supervisor.of(state.lease.holder, slab)):
            if worker.is_running and not worker.process.hello.is_set():
                lease = state.engines[index] if state.engines else state.lease
                beat = rules.Beat(state.lease.token, min(-2, lease.progress - 1))
                self._step(slab, OfEngine(index, beat) if state.engines else beat)

    def died(self, worker: Worker) -> None:
        """Handles the end of a worker. An engine of several is started again while the others go on. Else
        its role has died on the slab when all its workers ended; ranks are killed as a whole."""
        slab = worker.slab
        if slab is None or worker.starts <= self._slabs[slab].ended_before.get(worker.name, 0):
            return
        state, workers = self._slabs[slab].shared, self._supervisor.of(worker.role, slab)
        if state.engines and (state.lease.stage, state.lease.holder) == (Stage.HELD, worker.role):
            self._step(slab, OfEngine(workers.index(worker), rules.Died(worker.role)))
        elif not self._has_rest(worker, workers) and worker.role == state.lease.holder:
            self._all_ended(slab, worker.role)

    def _has_rest(self, worker: Worker, workers: list[Worker]) -> bool:
        """Returns whether other workers of the role are left; kills the other ranks of a trainer, or of an
        engine."""
        if worker.role != TRAINER and worker.rank is None:
            return any(w.is_running and not w.process.is_asleep for w in workers)
        rest = [w for w in workers if w.is_running]
        self._processes.signal(rest, signal.SIGKILL)
        return bool(rest)

    def _all_ended(self, slab: Slab, role: str) -> None:
        """Handles the end of the last worker of the holder that was awake."""
        self._processes.learn(slab, role)
        self._step(slab, rules.Died(role))

    async def settled(self, slab: Slab, role: str, deadline_s: float) -> bool:
        """See `Settling.wait`."""
        return await self._settling.wait(slab, role, deadline_s)

    def _step(self, slab: Slab, event: sharing.Event) -> None:
        managed, before = self._slabs[slab], self.lease(slab)
        # The time during which the arbiter was suspended does not count.
        now_s = self._clock.at(clock.monotonic_s(), period_s=TICK_S)
        managed.shared, actions = sharing.step(
            managed.shared, event, now_s, managed.timing, managed.num_engines
        )
        after = self.lease(slab)
        if before.stage is Stage.HELD and after.stage is not Stage.HELD:
            self._holding.take_back(slab)
        if after.stage is not before.stage:
            self._note(slab, before, after)
        for action in actions:
            if isinstance(action, ForEngine):
                self._perform_on(slab, after, action)
            else:
                self._perform(slab, action)
        if after.stage is not before.stage:
            self._settling.announce()

    def _note(self, slab: Slab, before: SlabLease, after: SlabLease) -> None:
        if after.stage is Stage.TERMINATED:
            self._events.emit(
                LeaseExpired(slab=slab.name, holder=before.holder, token=before.token, cause=after.cause)
            )
        elif before.stage in (Stage.HELD, Stage.RELEASING) and after.stage is Stage.CHECKING:
            self._events.emit(LeaseReleased(slab=slab.name, holder=before.holder, token=before.token))

    def _perform(self, slab: Slab, action: rules.Action) -> None:
        match action:
            case rules.RequestRelease(role, token):
                self._allow_time(slab, role)
                self._tasks.spawn(self._release(slab, role, token))
            case rules.Give(role, token):
                self._grant(slab, role, token)
            case rules.Measure():
                self._step(slab, self._checked(slab, self.lease(slab), slab.gpus))
            case rules.Terminate(role):
                self._end(slab, role, END)
            case rules.Kill(role):
                self._end(slab, role, signal.SIGKILL)
            case rules.Purge(spare):
                self._processes.purge(slab, spare)
            case rules.Quarantine(cause):
                self._events.emit(SlabQuarantined(slab=slab.name, cause=cause))
                # The trainer needs a shared slab in its phase, so the run cannot continue without it. An
                # engine node leaves the run.
                self._failed(f"GPU set {slab.name} is quarantined: {cause}", EXIT_FAILED)

    def _perform_on(self, slab: Slab, lease: SlabLease, action: ForEngine) -> None:
        """Carries out an action on one engine of several, unless their grant has ended meanwhile."""
        if not rules.is_live(self.lease(slab), lease.token):
            return
        worker = self._supervisor.of(lease.holder, slab)[action.index]
        engine = self._slabs[slab].shared.engines[action.index]
        match action.action:
            case rules.Terminate():
                self._events.emit(EngineExpired(worker=worker.address, cause=engine.cause))
                self._processes.signal([worker], END)
            case rules.Kill():
                self._processes.signal([worker], signal.SIGKILL)
            case rules.Measure():
                self._step(slab, OfEngine(action.index, self._checked(slab, engine, worker.gpus)))
            case rules.Give():
                self._tasks.spawn(self._holding.restart(worker, lease.token))

    def _grant(self, slab: Slab, role: str, token: int) -> None:
        self._events.emit(LeaseGranted(slab=slab.name, holder=role, token=token))
        managed = self._slabs[slab]
        managed.beats.clear()
        for worker in self._supervisor.of(role, slab):
            managed.ended_before[worker.name] = worker.starts - worker.is_running
        self._tasks.spawn(self._wake(slab, role, token))

    def _end(self, slab: Slab, role: str, number: signal.Signals) -> None:
        """Signals the workers of a holder that do not sleep yet."""
        workers = self._processes.awake(slab, role)
        self._processes.signal(workers, number)
        if not workers:
            self._all_ended(slab, role)

    def _checked(self, slab: Slab, lease: SlabLease, gpus: tuple[int, ...]) -> rules.MemoryChecked:
        """Runs a memory check, and emits an event if memory is not free that should be."""
        checked = self._processes.measured(slab, lease.wanted, gpus)
        if not checked.clean and checked.detail != lease.cause:
            self._events.emit(MemoryNotFree(slab=slab.name, cause=checked.detail))
        return checked

    def _allow_time(self, slab: Slab, role: str) -> None:
        """Sets the time limit of a release by the bytes that the holder has now and may have to move."""
        moving_s = self._processes.movable_bytes(slab, role) / LEAST_MOVED_BYTES_PER_S
        release_s = round(self._node.config.lease.release_s + moving_s, 1)
        self._slabs[slab].timing = replace(self._slabs[slab].timing, release_s=release_s)

    async def _release(self, slab: Slab, role: str, token: int) -> None:
        try:
            await self._holding.sleep(slab, role, token, self._slabs[slab].timing.release_s)
        except (WorkerFailed, DeadlineExceeded) as error:  # ticks escalate to termination
            self._events.emit(LeaseRefused(slab=slab.name, holder=role, token=token, error=str(error)))
            return
        if rules.is_live(self.lease(slab), token):
            self._processes.learn(slab, role)
            self._step(slab, rules.Released(token))

    async def _wake(self, slab: Slab, role: str, token: int) -> None:
        await self._holding.wake(slab, role, token)
        if rules.is_live(self.lease(slab), token):
            self._slabs[slab].awake = token
            self._settling.announce()

    def weigh(self, worker: Worker) -> int:
        """Returns the bytes that a worker uses now, measured as for this node's device."""
        return self._processes.weigh(worker)
