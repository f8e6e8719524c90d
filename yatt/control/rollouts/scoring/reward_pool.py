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
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from yatt import clock
from yatt.adapters.net.channel import Channel
from yatt.config.schema import RunConfig
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import ASYNC, REWARD, Worker
from yatt.core.attempts.exits import describe_exit
from yatt.core.requests.dispatch import Dispatch
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, DeadlineExceeded, WorkerFailed
from yatt.obs.story.events import EventLog
from yatt.records import message as m
from yatt.records.episode import ENVIRONMENT

Call = m.Score | m.ScoreMany | m.Step
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


class RewardPool:
    """Runs calls in the reward processes of one node.

    Args:
        failed: called with (error, exit code) for a failure that this node cannot recover from.
        moved: called when a call has ended or exceeded its limit: both are progress.
    """

    def __init__(
        self, config: RunConfig, supervisor: Supervisor, channel: Channel, events: EventLog,
        failed: Callable[[str, int], None], moved: Callable[[], None],
    ) -> None:  # fmt: skip
        self._moved = moved
        self._supervisor, self._channel, self._events, self._failed = supervisor, channel, events, failed
        self._limits = {reward.name: reward.timeout_s for reward in config.rewards}
        self._limits |= {g.name: g.timeout_s if g.path else g.verdict.timeout_s for g in config.genrms}
        self._limits[ENVIRONMENT] = config.environment.timeout_s
        self._asynchronous = {genrm.name for genrm in config.genrms if genrm.path}
        self._dispatch = Dispatch(patience=PATIENCE, isolates=True)
        self._calls: dict[str, tuple[Call, asyncio.Future[m.Message]]] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_starts: Counter[bool] = Counter()  # in a row, of all processes; key: was it killed
        self._most_killed = max(
            MOST_KILLED_STARTS, 3 * sum(w.role == REWARD for w in supervisor.workers.values())
        )
        self._hung: set[str] = set()
        self._most_overruns = MOST_OVERRUNS if config.run.deterministic else 0
        self._overruns: Counter[str] = Counter()
        self._waits_since: dict[str, float] = {}
        self._row_limit_s = config.launch.phase_timeout_s

    async def call(self, order: Call) -> m.Message:
        """Returns the order's answer, or Failed with the reason; repeats the call if its process dies."""
        key = f"{order.reward}/{next(self._numbers)}"
        future: asyncio.Future[m.Message] = asyncio.get_running_loop().create_future()
        self._calls[key] = order, future
        self._dispatch.submit(key, ASYNC if order.reward in self._asynchronous else SYNC)
        self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            if self._dispatch.withdraw(key):  # else its process is busy with it until it answers
                self._calls.pop(key, None)
                self._overruns.pop(key, None)
                self._waits_since.pop(key, None)
            raise
        finally:
            self._moved()

    def loaded(self, body: m.RewardsLoaded) -> None:
        """Records which functions are asynchronous; a process reports this before it accepts calls."""
        self._asynchronous |= set(body.asynchronous)

    def stuck(self, worker: Worker, body: m.RewardsStuck) -> None:
        """Handles a report of calls that cannot be ended and were answered. If they are many, the process is
        replaced, and its other calls are sent again without suspicion."""
        if body.calls < MOST_STUCK or worker.address in self._hung:
            return
        self._hung.add(worker.address)
        self._events.emit("reward.kill", worker=worker.address, call="", limit_s=body.limit_s)
        self._dispatch.leave(worker.address)
        self._supervisor.end(worker)

    def ready(self, worker: Worker) -> None:
        """Adds a process that accepts calls."""
        self._failed_starts.clear()
        is_async = worker.name.endswith(ASYNC)
        self._dispatch.serve(worker.address, ASYNC if is_async else SYNC, ASYNC_ROOM if is_async else 1)
        self._pump()

    def ended(self, worker: Worker, how: str) -> None:
        """Handles the end of a process: its calls are sent again, except those in too many ended processes.

        A killed process may not be at fault: SIGKILL comes from outside, or from us if the process hung.
        """
        was_hung = worker.address in self._hung
        self._hung.discard(worker.address)
        if not worker.hello.is_set():
            self._failed_starts[how == KILLED] += 1
            most = self._most_killed if how == KILLED else MOST_FAILED_STARTS
            if self._failed_starts[how == KILLED] >= most:
                self._spawn(self._give_up(worker, how))
        for key in self._dispatch.died(worker.address):
            error, is_users = f"ended its process each time ({how})", was_hung or how != KILLED
            self._settle(key, m.Failed(error=error, exit_code=EXIT_USER_MISTAKE if is_users else EXIT_FAILED))
        self._pump()

    async def _give_up(self, worker: Worker, how: str) -> None:
        says = f"{worker.name} cannot start ({how}). {await self._supervisor.where(worker)}"
        self._failed(says, EXIT_USER_MISTAKE if how.startswith("exit code") else EXIT_FAILED)

    def _pump(self) -> None:
        for assignment in self._dispatch.assign():
            self._spawn(self._run(assignment.key, assignment.server))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: str, server: str) -> None:
        order, _ = self._calls[key]
        is_sync = order.reward not in self._asynchronous
        repeated: m.Order[Any] = msgspec.structs.replace(order, limit_factor=2 ** self._overruns[key])
        limit_s = self._limits[order.reward] * 2 ** self._overruns[key]
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
        if isinstance(answer, m.Failed) and answer.waits and self._may_wait(key):
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

    def _may_wait(self, key: str) -> bool:
        """Whether a call may wait for an unreadable data row; this costs time, not the sample."""
        since_s = self._waits_since.setdefault(key, clock.monotonic_s())
        return clock.monotonic_s() - since_s < self._row_limit_s and not self._calls[key][1].done()

    def _overdue(self, key: str, server: str, limit_s: float, *, is_sync: bool) -> None:
        """Handles a missing answer: the process hangs and must be killed."""
        worker = self._supervisor.by_address(server)
        if server not in self._hung:  # one event is enough for all calls that shared it
            self._events.emit("reward.kill", worker=server, call=key, limit_s=float(limit_s))
        if is_sync:
            self._dispatch.leave(server)  # else the next call would run in it and be killed too
            if not self._may_be_asked_again(key):
                self._settle(key, m.Failed(error=self._too_slow(key), exit_code=EXIT_USER_MISTAKE))
            self._pump()
        if worker is not None:
            self._hung.add(server)
            self._supervisor.end(worker)

    def _may_be_asked_again(self, key: str) -> bool:
        """Counts one more exceeded limit; returns whether the call may be repeated."""
        self._moved()
        self._overruns[key] += 1
        return self._overruns[key] <= self._most_overruns and not self._calls[key][1].done()

    def _too_slow(self, key: str) -> str:
        limit_s, times = self._limits[self._calls[key][0].reward], 2 ** (self._overruns[key] - 1)
        return f"took longer than {f'{times} times ' if times > 1 else ''}its timeout_s {limit_s:g}"

    def _settle(self, key: str, answer: m.Message) -> None:
        call: Any = self._calls.pop(key, None)
        self._overruns.pop(key, None)
        self._waits_since.pop(key, None)
        self._dispatch.done(key)
        if call is not None and not call[1].done():
            call[1].set_result(answer)
        self._pump()
