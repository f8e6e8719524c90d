"""Sends orders to this node's workers, with their lease's token; wakes whole roles and puts them to sleep.

The arbiter uses `Workers` to start missing processes, wake them under a grant, load the newest weights into
rollout engines, and add engines to the routing table.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable
from typing import Protocol, TypeVar

import msgspec

from yatt import clock
from yatt.control.gpus.engines import LocalEngines
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.control.gpus.unfit import UnfitEngines
from yatt.control.gpus.weights.publications import LocalPublication, Publications, sum_of_boxes, sum_of_parts
from yatt.control.node import Node
from yatt.core.gpus.placement import ROLLOUT, TRAINER, Slab
from yatt.core.gpus.weight_check import WeightCheck
from yatt.core.requests.delivery import RequestWatch
from yatt.core.requests.first_use import WakeFailures
from yatt.errors import EXIT_FAILED, DeadlineExceeded, SyncMismatch, WorkerFailed
from yatt.obs.story.events import EventLog
from yatt.records import message as m
from yatt.records.events.processes import WorkerReported
from yatt.records.events.saves import WeightsChecked, WeightsPublished

A = TypeVar("A", bound=m.Message)
MOST_DEATHS = 8
"""Ends of an engine in a row without one completion: more than chance and a few harmful prompts explain."""

ROW_S = 3600.0
"""Ends that are farther apart are not counted as a row: an idle engine may die now and then."""


class Grants:
    """The arbiter's grants to this node's workers: who may be woken, and the token of each one's orders."""

    def __init__(self) -> None:
        self._granted: dict[Slab, tuple[str, int]] = {}  # role and token; ("", 0) once it is taken back
        self._tokens: dict[str, int] = {}

    def give(self, slab: Slab, role: str, token: int) -> None:
        """Lets the role's workers on the slab be woken."""
        self._granted[slab] = role, token

    def take_back(self, slab: Slab) -> None:
        """Lets no more workers be woken under the slab's grant."""
        self._granted[slab] = "", 0

    def covers(self, worker: Worker, token: int) -> bool:
        """Whether this worker may be woken under this token."""
        return worker.slab is None or self._granted.get(worker.slab) == (worker.role, token)

    def has_slab(self, worker: Worker) -> bool:
        """Whether the worker's slab is granted to its role."""
        return worker.slab is not None and self._granted.get(worker.slab, ("", 0))[0] == worker.role

    def use(self, worker: Worker, token: int) -> None:
        """Sends the worker's orders under this token from now on."""
        self._tokens[worker.name] = token

    def token(self, worker: Worker) -> int:
        """Returns the token of the worker's orders; 0 before the first."""
        return self._tokens.get(worker.name, 0)


class DeathRows:
    """Ends of each worker's processes in a row, without a completion between them."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()
        self._died_s: dict[str, float] = {}

    def ended(self, worker: Worker, *, was_useful: bool) -> int:
        """Counts the end of a process; returns how many there were in a row."""
        now_s, last_s = clock.monotonic_s(), self._died_s.get(worker.name, 0.0)
        self._died_s[worker.name] = now_s
        is_row = not was_useful and now_s - last_s < ROW_S
        self._deaths[worker.name] = self._deaths[worker.name] + 1 if is_row else 1
        return self._deaths[worker.name]


class SendsOrder(Protocol):
    """Sends an order to a worker and returns its answer; see `Workers.order`."""

    async def __call__(self, worker: Worker, body: m.Order[A]) -> A: ...


class EngineWeights:
    """Loads published weights into this node's rollout engines, and compares them.

    Args:
        order: sends an order to a worker.
    """

    def __init__(
        self, publications: Publications, order: SendsOrder, check: WeightCheck, events: EventLog
    ) -> None:
        self.publications, self._order, self._weight_check, self._events = publications, order, check, events
        self._loaded: dict[str, int] = {}  # by address: the policy version that it loaded last
        self._taking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def taking(self, worker: Worker) -> asyncio.Lock:
        """Returns the lock of a worker that loads weights: one publication after the other."""
        return self._taking[worker.name]

    async def catch_up(self, worker: Worker, engines: LocalEngines) -> None:
        """Loads the newest publication into an engine that is awake and has an older one."""
        newest = self.publications.newest
        async with self.taking(worker):
            is_behind = newest is not None and self._loaded.get(worker.address) != newest.policy_version
            if newest is not None and is_behind and engines.is_awake(worker.address):
                await self._load(worker, newest)

    async def load_newest(self, worker: Worker) -> None:
        """Loads the newest publication. If host copies have changed meanwhile, the engine is refused; it then
        loads the next publication."""
        published = await self.publications.newer_than(None)
        while published is not None:
            try:
                return await self._load(worker, published)
            except WorkerFailed:
                published = await self.publications.newer_than(published)
                if published is None:
                    raise

    async def _load(self, worker: Worker, published: LocalPublication) -> None:
        """Makes a rollout engine load a publication, and compares its log-probs with the trainer's."""
        body = m.LoadWeights(
            policy_version=published.policy_version, folder=str(published.folder), probe=published.probe
        )
        answer = await self._order(worker, body)
        self._loaded[worker.address] = published.policy_version
        self._check(worker, published, answer)

    def _check(self, worker: Worker, published: LocalPublication, answer: m.WeightsLoaded) -> None:
        """Raises SyncMismatch if the engine's weights, or log-probs, are not the published ones."""
        checked = self._weight_check.checked(published.expected, published.rounding, answer)
        self._events.emit(
            WeightsChecked(
                worker=worker.address,
                policy_version=published.policy_version,
                difference=checked.difference,
                allowed=checked.allowed,
                num_compared=answer.num_compared,
            )
        )
        if checked.fault:
            raise SyncMismatch(f"{worker.name}: {checked.fault}. See docs/runbook.md, 'Sync mismatch'.")


class Workers:
    """Sends orders to the workers of one node.

    Args:
        publications: the weights that rollout engines load.
        unfit: takes failures of engines whose slab can go back to another role, and reports others.
    """

    def __init__(
        self,
        node: Node,
        supervisor: Supervisor,
        engines: LocalEngines,
        publications: Publications,
        unfit: UnfitEngines,
        events: EventLog,
    ) -> None:
        self._node, self._supervisor, self._engines = node, supervisor, engines
        self._events, self._unfit = events, unfit
        self._weights = EngineWeights(publications, self.order, WeightCheck(node.config), events)
        self._grants = Grants()
        self._waking: set[str] = set()  # names of workers that are being started or woken
        self._failures, self._deaths = WakeFailures(), DeathRows()

    async def order(self, worker: Worker, body: m.Order[A]) -> A:
        """Sends an order under the worker's token and waits for its answer.

        Raises:
            WorkerFailed: the worker ended, or answered Failed.
            DeadlineExceeded: no answer in time.
        """
        limit_s = self._node.config.launch.phase_timeout_s
        token = self._grants.token(worker) if body.under_lease else 0
        return await self._order(worker, body, limit_s, token)

    async def _order(self, worker: Worker, body: m.Order[A], limit_s: float, token: int) -> A:
        watch = RequestWatch(progress=lambda: worker.work)
        answer = await self._engines.channel.request(worker.address, body, limit_s, token=token, watch=watch)
        self._supervisor.waits(worker, "")
        if isinstance(answer, m.Failed):
            self._events.emit(WorkerReported(worker=worker.address, error=answer.error, trace=answer.trace))
        done = m.unless_failed(answer, worker.name)
        worker.process.has_computed |= isinstance(body, m.Train)
        return done

    def trainers(self) -> list[Worker]:
        """Returns this node's trainer ranks, by local rank."""
        ranks = [w for w in self._supervisor.workers.values() if w.role == TRAINER]
        return sorted(ranks, key=lambda w: w.gpus)

    async def order_trainers(self, body: m.Order[A]) -> list[A]:
        """Sends the same order to every local rank."""
        return list(await asyncio.gather(*(self.order(w, body) for w in self.trainers())))

    async def wake(self, slab: Slab, role: str, token: int) -> None:
        """Wakes every worker of `role` on the slab, after the arbiter's grant."""
        self._grants.give(slab, role, token)
        await asyncio.gather(*(self._wake(w, token) for w in self._supervisor.of(role, slab)))

    async def restart(self, worker: Worker, token: int) -> None:
        """Starts and wakes one engine of a role that has several on its slab, under their token."""
        if self._grants.covers(worker, token):
            await self._wake(worker, token)

    def take_back(self, slab: Slab) -> None:
        """Lets no more workers be woken under the slab's grant."""
        self._grants.take_back(slab)

    async def sleep(self, slab: Slab, role: str, token: int, release_s: float) -> None:
        """Puts the workers of `role` on the slab to sleep, at the arbiter's request. A process that is being
        started has nothing on the slab and is not waited for; if it has not begun, its start is abandoned.

        Args:
            release_s: the arbiter's time limit; then it terminates them.
        """
        self.take_back(slab)
        running = [w for w in self._supervisor.of(role, slab) if w.is_running]
        workers = [w for w in running if w.process.hello.is_set()]
        for worker in running:
            worker.process.is_unwanted |= worker.process.child is None and not worker.process.hello.is_set()
        for worker in workers:
            self._engines.drain(worker.address)
        limit_s = release_s + self._node.config.lease.term_s
        await asyncio.gather(*(self._put_to_sleep(w, limit_s, token) for w in workers))
        for worker in workers:  # what it had returned was sent before its answer
            self._engines.remove(worker.address, "was put to sleep")

    async def _put_to_sleep(self, worker: Worker, limit_s: float, token: int) -> None:
        address = worker.address
        worker.process.has_computed |= self._engines.was_of_use(address)
        try:
            await self._order(worker, m.Sleep(), limit_s, token)
            worker.process.is_asleep = worker.address == address
        except WorkerFailed:
            if worker.address == address and worker.is_running:  # else it has ended, which is enough
                raise

    def forget(self, worker: Worker, how: str) -> None:
        """Handles the end of a worker's process. An engine that ends too often in a row without a completion
        is a failure, since more restarts would not help."""
        is_retired = self._supervisor.was_retired(worker.address)
        if worker.name in self._waking and not is_retired:
            self._gives_back(worker, f"ended: {how}")
        self._engines.remove(worker.address, f"ended: {how}", is_blamed=True)
        self._engines.channel.fail_waiting(worker.address, WorkerFailed(f"{worker.name} ended: {how}"))
        deaths = self._deaths.ended(worker, was_useful=self._engines.bury(worker.address) or is_retired)
        if worker.is_engine and deaths >= MOST_DEATHS:
            log = self._node.paths.log(self._node.attempt, worker.address)
            says = f"{worker.name} ended {deaths} times in a row, and completed nothing meanwhile: {how}"
            self._unfit.report(f"{says}. The last log is {log}.", EXIT_FAILED)

    async def publish(self, order: m.Publish) -> m.Published:
        """Makes this node's ranks bring their host copies up to date; returns one answer for all of them."""
        self._weights.publications.change()
        answers = await self.order_trainers(order)
        size_bytes = sum(answer.size_bytes for answer in answers)
        self._events.emit(WeightsPublished(policy_version=order.policy_version, size_bytes=size_bytes))
        sums = sum_of_boxes(answer.sums for answer in answers)
        parts = sum_of_parts(answer.part_sums for answer in answers)
        return msgspec.structs.replace(answers[0], size_bytes=size_bytes, sums=sums, part_sums=parts)

    async def sync(self) -> None:
        """Loads the newest weights into rollout engines that kept their slab through training.

        An engine that is being started loads them by itself.
        """
        rollouts = [w for w in self._supervisor.workers.values() if w.role == ROLLOUT]
        await asyncio.gather(*(self._guarded(w, self._weights.catch_up(w, self._engines)) for w in rollouts))

    async def _wake(self, worker: Worker, token: int) -> None:
        self._waking.add(worker.name)
        try:
            lack = await self._unfit.lack(worker)
            if (lack and self._gives_back(worker, lack)) or not self._grants.covers(worker, token):
                return  # not granted: another engine of the slab found the same lack first
            await self._supervisor.start(worker)
            await self._guarded(worker, self._bring_up(worker, token))
        finally:
            self._waking.discard(worker.name)

    def _gives_back(self, worker: Worker, error: str) -> bool:
        """Whether a failed worker's slab goes to another role; not if the slab was taken from it
        meanwhile."""
        return self._grants.has_slab(worker) and self._unfit.failed(worker, error)

    async def _bring_up(self, worker: Worker, token: int) -> None:
        await self._supervisor.ready(worker)
        if not self._grants.covers(worker, token):
            return  # the slab was taken back while the process started; another role may hold it now
        self._grants.use(worker, token)
        worker.process.is_asleep = False
        await self.order(worker, m.Wake())
        try:
            await self._equip(worker, token)
        except WorkerFailed:
            if self._grants.covers(worker, token):  # else it was ordered to sleep meanwhile, and refuses
                raise
        self._failures.worked(worker.name)

    async def _equip(self, worker: Worker, token: int) -> None:
        """Loads the newest weights into an engine that is awake, and lets it take requests."""
        address = worker.address
        async with self._weights.taking(worker):  # `sync` loads later publications
            if worker.role == ROLLOUT and self._grants.covers(worker, token):
                await self._weights.load_newest(worker)
            if worker.address != address:
                raise WorkerFailed(f"{worker.name} has ended meanwhile; it is started again")
            if worker.role != TRAINER and self._grants.covers(worker, token):
                assert worker.slab is not None, "engines live on GPU sets"
                place = worker.address, worker.role, worker.slab
                await self._engines.add(*place, token, takes_requests=worker.takes_requests)
                self._unfit.proved(worker.slab, worker.role)

    async def _guarded(self, worker: Worker, work: Awaitable[None]) -> None:
        """Runs `work`. A failure ends the process; a user's mistake or too many failures, the attempt."""
        address = worker.address
        try:
            await work
        except SyncMismatch as error:
            self._unfit.report(str(error), error.exit_code)
        except (WorkerFailed, DeadlineExceeded) as error:
            if self._supervisor.was_retired(address):
                return
            if self._gives_back(worker, str(error)):
                if worker.address == address:
                    self._supervisor.end(worker)
                return
            is_own = not self._supervisor.was_killed(address)  # else `forget` counts the failure
            if end := self._failures.failed(worker.name, error, is_own=is_own):
                self._unfit.report(*end)
            elif (
                worker.process.child is not None and worker.address == address
            ):  # else a later start has replaced it
                self._supervisor.end(worker)
