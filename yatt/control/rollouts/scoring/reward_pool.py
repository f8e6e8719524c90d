"""This node's reward processes: assigns calls to them, and handles calls that hang or end their process.

The rules are in `yatt.core.requests.dispatch`. A process runs one synchronous call at a time, so a call that
takes too long is identified, and its process is killed. Asynchronous calls share a process, which enforces
their limits itself. If one blocks the event loop, the process is killed and the other calls are sent again. A
call that ignores its cancellation is answered as failed; a process with many of these is replaced.
"""

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from yatt import clock
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.crowd import Spawned
from yatt.config.schema import RunConfig
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import ASYNC, REWARD, Worker
from yatt.core.attempts.exits import describe_exit
from yatt.core.requests.dispatch import Dispatch
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, DeadlineExceeded, WorkerFailed
from yatt.judging.outside import way_name
from yatt.obs.story.events import EventLog
from yatt.records import message as m
from yatt.records.episode import ENVIRONMENT
from yatt.records.events.processes import RewardCallKilled

Call = m.Score | m.ScoreMany | m.Step | m.JudgeGroup
SYNC = "sync"
ASYNC_ROOM = 256
PATIENCE = 3
"""Number of processes that may end during a call before the call fails."""

GRACE_S = 1.0
"""Time for an answer in addition to the function's own limit."""

MOST_OVERRUNS = 2
"""Number of retries, in deterministic mode, of a call that exceeded its limit, each with twice the time: the
limit is wall time, and the load of the machine must not decide what is trained on."""

ROW_RETRY_S = 1.0
"""Time between two tries of a call whose data row cannot be read."""

MOST_STUCK = 8
"""Asynchronous calls that continue in a process after their cancellation; then it is replaced."""

MOST_FAILED_STARTS = 3
MOST_KILLED_STARTS = 8
"""Limits for starts in a row, over all processes; a killed process may not be at fault."""

KILLED = describe_exit(-signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of calls.

    Attributes:
        seconds: of each function.
        overruns: number of retries of a call that exceeded its limit.
        row_s: longest time without a data row.
    """

    seconds: Mapping[str, float]
    overruns: int
    row_s: float

    @classmethod
    def of(cls, config: RunConfig) -> "_Limits":
        """Those of a run file."""
        found = {reward.name: reward.timeout_s for reward in config.rewards}
        found |= {g.name: g.timeout_s if g.asks_by_client else g.verdict.timeout_s for g in config.genrms}
        found |= {way_name(g.name): g.timeout_s for g in config.genrms}
        found[ENVIRONMENT] = config.environment.timeout_s
        overruns = MOST_OVERRUNS if config.run.deterministic else 0
        return cls(found, overruns, config.launch.phase_timeout_s)


@dataclass(slots=True)
class _PendingCall:
    """A call without an answer.

    Attributes:
        overruns: how often it exceeded its limit.
        waits_since_s: since when its data row cannot be read.
    """

    order: Call
    future: "asyncio.Future[m.Message]"
    overruns: int = 0
    waits_since_s: float | None = None

    @property
    def factor(self) -> int:
        """Multiple of the function's limit."""
        return 1 << self.overruns


class _PendingCalls:
    """The calls without an answer, by key, and what is known of their functions.

    Attributes:
        asynchronous: names of asynchronous functions.
    """

    def __init__(self, config: RunConfig) -> None:
        self._limits = _Limits.of(config)
        self.asynchronous = {genrm.name for genrm in config.genrms if genrm.asks_by_client}
        self._calls: dict[str, _PendingCall] = {}
        self._numbers = itertools.count(1)

    def __contains__(self, key: str) -> bool:
        return key in self._calls

    def __getitem__(self, key: str) -> _PendingCall:
        return self._calls[key]

    def add(self, order: Call) -> tuple[str, "asyncio.Future[m.Message]"]:
        """Adds a call; returns its key and what becomes its answer."""
        key = f"{order.reward}/{next(self._numbers)}"
        future: asyncio.Future[m.Message] = asyncio.get_running_loop().create_future()
        self._calls[key] = _PendingCall(order, future)
        return key, future

    def remove(self, key: str) -> _PendingCall | None:
        """Removes a call, if it is here."""
        return self._calls.pop(key, None)

    def is_sync(self, order: Call) -> bool:
        """Whether the call has a process for itself."""
        return order.reward not in self.asynchronous

    def limit_s(self, call: _PendingCall) -> float:
        """Returns the limit of a call's next try."""
        return self._limits.seconds[call.order.reward] * call.factor

    def may_wait(self, key: str) -> bool:
        """Whether a call may wait for an unreadable data row; this costs time, not the sample."""
        call, now_s = self._calls.get(key), clock.monotonic_s()
        if call is None:
            return False
        call.waits_since_s = now_s if call.waits_since_s is None else call.waits_since_s
        return now_s - call.waits_since_s < self._limits.row_s and not call.future.done()

    def may_be_asked_again(self, key: str) -> bool:
        """Counts one more exceeded limit; returns whether the call may be repeated. It may be answered
        already, by another process to which it was sent again."""
        call = self._calls.get(key)
        if call is None:
            return False
        call.overruns += 1
        return call.overruns <= self._limits.overruns and not call.future.done()

    def too_slow(self, key: str) -> str:
        """Says that a call has exceeded its limit each time."""
        call = self._calls[key]
        limit_s, times = self._limits.seconds[call.order.reward], call.factor // 2
        return f"took longer than {f'{times} times ' if times > 1 else ''}its timeout_s {limit_s:g}"


class _Starts:
    """Starts in a row that failed, of all processes. A killed process may not be at fault."""

    def __init__(self, num_processes: int) -> None:
        self._most = {False: MOST_FAILED_STARTS, True: max(MOST_KILLED_STARTS, 3 * num_processes)}
        self._failed: Counter[bool] = Counter()

    def began(self) -> None:
        """A process has started."""
        self._failed.clear()

    def failed(self, *, is_killed: bool) -> bool:
        """A process has ended before it started; returns whether these are too many."""
        self._failed[is_killed] += 1
        return self._failed[is_killed] >= self._most[is_killed]


class RewardPool:
    """Runs calls in the reward processes of one node.

    Args:
        failed: called with (error, exit code) for a failure that this node cannot recover from.
        moved: called when a call has ended or exceeded its limit: both are progress.
    """

    def __init__(
        self,
        config: RunConfig,
        supervisor: Supervisor,
        channel: Channel,
        events: EventLog,
        failed: Callable[[str, int], None],
        moved: Callable[[], None],
    ) -> None:
        self._moved, self._failed = moved, failed
        self._supervisor, self._channel, self._events = supervisor, channel, events
        self._dispatch = Dispatch(patience=PATIENCE, isolates=True)
        self._calls = _PendingCalls(config)
        self._tasks = Spawned()
        self._starts = _Starts(sum(w.role == REWARD for w in supervisor.workers.values()))
        self._hung: set[str] = set()

    async def call(self, order: Call) -> m.Message:
        """Returns the order's answer, or Failed with the reason; repeats the call if its process dies."""
        key, future = self._calls.add(order)
        self._dispatch.submit(key, SYNC if self._calls.is_sync(order) else ASYNC)
        self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            if self._dispatch.withdraw(key):  # else its process is busy with it until it answers
                self._calls.remove(key)
            raise
        finally:
            self._moved()

    def loaded(self, body: m.RewardsLoaded) -> None:
        """Records which functions are asynchronous; a process reports this before it accepts calls."""
        self._calls.asynchronous |= set(body.asynchronous)

    def stuck(self, worker: Worker, body: m.RewardsStuck) -> None:
        """Handles a report of calls that cannot be ended and were answered. If they are many, the process is
        replaced, and its other calls are sent again without suspicion."""
        if body.calls < MOST_STUCK or worker.address in self._hung:
            return
        self._hung.add(worker.address)
        self._events.emit(RewardCallKilled(worker=worker.address, call="", limit_s=body.limit_s))
        self._dispatch.leave(worker.address)
        self._supervisor.end(worker)

    def ready(self, worker: Worker) -> None:
        """Adds a process that accepts calls."""
        self._starts.began()
        is_async = worker.name.endswith(ASYNC)
        self._dispatch.serve(worker.address, ASYNC if is_async else SYNC, ASYNC_ROOM if is_async else 1)
        self._pump()

    def ended(self, worker: Worker, how: str) -> None:
        """Handles the end of a process: its calls are sent again, except those in too many ended processes.

        A killed process may not be at fault: SIGKILL comes from outside, or from us if the process hung.
        """
        was_hung = worker.address in self._hung
        self._hung.discard(worker.address)
        if not worker.process.hello.is_set() and self._starts.failed(is_killed=how == KILLED):
            self._tasks.spawn(self._give_up(worker, how))
        for key in self._dispatch.died(worker.address):
            error, is_users = f"ended its process each time ({how})", was_hung or how != KILLED
            self._settle(key, m.Failed(error=error, exit_code=EXIT_USER_MISTAKE if is_users else EXIT_FAILED))
        self._pump()

    async def _give_up(self, worker: Worker, how: str) -> None:
        says = f"{worker.name} cannot start ({how}). {await self._supervisor.where(worker)}"
        self._failed(says, EXIT_USER_MISTAKE if how.startswith("exit code") else EXIT_FAILED)

    def _pump(self) -> None:
        for assignment in self._dispatch.assign():
            self._tasks.spawn(self._run(assignment.key, assignment.server))

    async def _run(self, key: str, server: str) -> None:
        call = self._calls[key]
        is_sync = self._calls.is_sync(call.order)
        repeated: m.Order[Any] = msgspec.structs.replace(call.order, limit_factor=call.factor)
        limit_s = self._calls.limit_s(call)
        try:
            answer = await self._channel.request(server, repeated, limit_s + GRACE_S, is_probed=not is_sync)
        except WorkerFailed:
            return  # the process has ended: `ended` decides
        except UnicodeEncodeError as error:  # else the call would never end, and its process stay busy
            says = f"the call cannot be sent: {error}"
            self._settle(key, m.Failed(error=says, exit_code=EXIT_USER_MISTAKE))
            return
        except DeadlineExceeded:
            self._overdue(key, server, limit_s, is_sync=is_sync)
            return
        if isinstance(answer, m.Failed) and answer.waits and self._calls.may_wait(key):
            await asyncio.sleep(ROW_RETRY_S)
            self._ask_again(key, server)
        elif isinstance(answer, m.Failed) and answer.overran and self._may_be_asked_again(key):
            self._ask_again(key, server)
        else:
            self._settle(key, answer)

    def _ask_again(self, key: str, server: str) -> None:
        if key in self._dispatch.keys(server):  # else its process has ended, and the call waits already
            self._dispatch.bounce(key)
        self._pump()

    def _overdue(self, key: str, server: str, limit_s: float, *, is_sync: bool) -> None:
        """Handles a missing answer: the process hangs and must be killed."""
        worker = self._supervisor.by_address(server)
        if server not in self._hung:  # one event is enough for all calls that shared it
            self._events.emit(RewardCallKilled(worker=server, call=key, limit_s=float(limit_s)))
        if is_sync:
            self._dispatch.leave(server)  # else the next call would run in it and be killed too
            if key in self._calls and not self._may_be_asked_again(key):
                self._settle(key, m.Failed(error=self._calls.too_slow(key), exit_code=EXIT_USER_MISTAKE))
            self._pump()
        if worker is not None:
            self._hung.add(server)
            self._supervisor.end(worker)

    def _may_be_asked_again(self, key: str) -> bool:
        self._moved()
        return self._calls.may_be_asked_again(key)

    def _settle(self, key: str, answer: m.Message) -> None:
        call = self._calls.remove(key)
        self._dispatch.done(key)
        if call is not None and not call.future.done():
            call.future.set_result(answer)
        self._pump()
