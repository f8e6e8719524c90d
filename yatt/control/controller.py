"""The controller of one node: answers the leader's orders and its workers' messages.

It owns its node's leases and processes, and on a trainer node also a shard of the prompts
(`yatt.control.trainer_node`). It holds no global batch: samples that another node trains on go there
directly.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable

from yatt.adapters.patience import exit_code_of
from yatt.adapters.wire import Channel
from yatt.control.gpus.arbiter import Arbiter, Holding
from yatt.control.gpus.engines import Bounced, LocalEngines
from yatt.control.gpus.publications import Publications
from yatt.control.gpus.supervisor import REWARD, Supervisor, Worker
from yatt.control.gpus.workers import MOST_DEATHS, Workers
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.control.rollouts.reward_pool import RewardPool
from yatt.control.rollouts.router import Router
from yatt.control.trainer_node import Owner
from yatt.core.lease import Stage
from yatt.core.placement import TRAINER, Slab
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, WorkerFailed, YattError
from yatt.obs.events import EventLog
from yatt.records import cluster as c, message as m

_LOG = logging.getLogger(__name__)
Answer = Awaitable[m.Message | None]


class Parts:
    """A controller's parts, made in the order they need each other."""

    def __init__(
        self, node: Node, hub: Channel, peers: Peers, events: EventLog,
        trouble: Callable[[str, int], None], on_exit: Callable[[Worker, str], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.supervisor = Supervisor(node, events, on_exit)
        self.engines = LocalEngines(hub, node.config, self._room_changed)
        self.progress = Progress(self.supervisor.work)
        self.publications = Publications(node, peers, events, self.progress)
        self.workers = Workers(node, self.supervisor, self.engines, self.publications, events, trouble)
        self.rewards = RewardPool(node.config, self.supervisor, hub, events, trouble, self.progress.done)
        self.router = Router(node, self.engines, peers, self.progress)
        self.peers, self.trouble, self._node = peers, trouble, node
        self._tasks: set[asyncio.Task[None]] = set()
        holding = Holding(wake=self.workers.wake, ask=self.workers.sleep)

        def quarantined(slab: Slab, cause: str) -> None:
            # Where slabs change hands each is the trainer's in its phase, so a run cannot go on without it;
            # a node that only runs engines loses its place, and the run what else was on it.
            trouble(f"slab {slab.name} is quarantined: {cause}", EXIT_FAILED)

        self.arbiter = Arbiter(node, self.supervisor, events, holding, quarantined)

    async def call_reward(self, order: m.Score) -> m.Message:
        """As of the pool; the end of a call is progress."""
        try:
            return await self.rewards.call(order)
        finally:
            self.progress.done()

    def lose(self, index: int, why: str) -> None:
        """A node is gone: nothing is asked of it any more, and what was is asked elsewhere."""
        self.peers.exclude(index, why)
        self.router.lose(index)

    def _room_changed(self, role: str) -> None:
        """Tell every trainer node, this one too, how many requests the engines here take now."""
        node, room, version = self._node, self.engines.room(role), self.engines.version
        if node.is_owner:
            self.router.room(role, node.index, room, version)
        for index in set(node.placement.owners) - {node.index}:
            task = asyncio.get_running_loop().create_task(self._tell_room(index, role, room, version))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell_room(self, index: int, role: str, room: int, version: int) -> None:
        limit_s = self._node.config.launch.phase_timeout_s
        with contextlib.suppress(YattError):  # lost nodes are the leader's to see
            await self.peers.request(index, c.EngineRoom(role=role, room=room, version=version), limit_s)


class Controller:
    """Carries out orders on one node.

    Args:
        owner: what a node with trainer ranks does besides; None on one that only runs engines.
    """

    def __init__(self, node: Node, parts: Parts, owner: Owner | None) -> None:
        self._node, self._parts, self._owner = node, parts, owner
        self.quit = asyncio.Event()
        self.exit_code = EXIT_FAILED
        publications = parts.publications
        self._orders: dict[type[m.Message], Callable[..., Answer]] = {
            c.StartWorkers: self._start_workers, c.HandOver: self._hand_over, c.PublishOrder: self._publish,
            c.ListPublication: publications.list_files, c.ReadPublication: publications.read,
            c.DigestPublication: publications.digest, c.FetchWeights: publications.fetch,
            c.SyncWeights: self._sync, c.Forward: self._forward, c.ForwardAbort: self._forward_abort,
            c.PeerLost: self._peer_lost, c.Quit: self._quit, c.StatusQuery: self._status,
            **(owner.orders if owner is not None else {}),
        }  # fmt: skip

    async def handle(self, sender: str, body: m.Message) -> m.Message | None:
        """An order of the leader, or a peer's message. What fails is answered by Failed."""
        if isinstance(body, c.EngineRoom):
            index = int(sender.removeprefix("node"))  # the session hears only nodes of this run
            self._parts.router.room(body.role, index, body.room, body.version)
            return m.Done()
        if (order := self._orders.get(type(body))) is None:
            return m.Failed(error=f"{type(body).__name__} is no order for this node", exit_code=EXIT_FAILED)
        try:
            return await order(body)
        except YattError as error:
            return m.Failed(error=str(error), exit_code=exit_code_of(error))
        except asyncio.CancelledError:
            error_text = f"{type(body).__name__} from {sender} was broken off"
            return m.Failed(error=error_text, exit_code=EXIT_FAILED)
        except OSError as error:  # a filesystem's trouble: another attempt may meet none
            says = f"{error.filename or 'writing'}: {error.strerror or error}"
            return m.Failed(error=says, exit_code=EXIT_FAILED)
        except Exception as error:  # noqa: BLE001 (answered, or the asker would wait out its deadline)
            _LOG.exception("a defect in answering %s", type(body).__name__)
            return m.Failed(error=f"a defect at {type(body).__name__}: {error!r}", exit_code=EXIT_FAILED)

    async def from_worker(self, sender: str, body: m.Message) -> m.Message | None:
        """A message of one of this node's workers; a dead start's last words are ignored."""
        worker = self._parts.supervisor.by_wire(sender.partition("/")[0])
        if worker is None:
            return None
        match body:
            case m.Failed() if body.user:
                self._parts.trouble(f"{worker.name}: {body.error}", EXIT_USER_MISTAKE)
            case m.Renew():
                worker.work = body.work
                self._parts.supervisor.waits(worker, body.waits_for)
                self._parts.arbiter.renewed(worker, body.token, body.turns + body.work)
            case m.Completed():
                self._parts.engines.completed(sender, body)
            case m.RewardsStuck():
                self._parts.rewards.stuck(worker, body)
            case m.Ask():
                assert self._owner is not None, "only trainer nodes have reward processes"
                return await self._owner.asked(body)
            case _:
                self._started(worker, body)
        return None

    def _started(self, worker: Worker, body: m.Message) -> None:
        """The first words of a worker's process."""
        match body:
            case m.RewardsLoaded():
                self._parts.rewards.loaded(body)
            case m.Hello():
                worker.hello_bytes = self._parts.arbiter.weigh(worker)
                worker.hello.set()
                if worker.role == REWARD:
                    self._parts.rewards.ready(worker)

    async def _start_workers(self, _: c.StartWorkers) -> m.Message:
        workers = list(self._parts.supervisor.workers.values())
        await asyncio.gather(*(self._first_start(worker) for worker in workers))
        return m.Done()

    async def _first_start(self, worker: Worker) -> None:
        """Until it takes orders. An engine or reward process that is killed meanwhile is started again, as at
        any later start.

        Raises:
            WorkerFailed, DeadlineExceeded: it does not start.
        """
        supervisor = self._parts.supervisor
        for left in reversed(range(MOST_DEATHS)):
            await supervisor.start(worker)
            wire = worker.wire
            try:
                return await supervisor.ready(worker)
            except WorkerFailed:
                is_final = worker.role == TRAINER or not supervisor.was_killed(wire)
                if is_final or not left or self.quit.is_set():
                    raise

    async def _hand_over(self, order: c.HandOver) -> m.Message:
        arbiter, holders = self._parts.arbiter, dict(order.holders)
        wanted: dict[Slab, str] = {}
        for slab in self._node.slabs:
            role = holders.get(slab.index, "")
            kept = arbiter.lease(slab).holder == role and arbiter.lease(slab).stage is Stage.HELD
            wanted[slab] = role if order.part == "enter" or kept else ""
            arbiter.want(slab, wanted[slab])
        for slab, role in wanted.items():
            await arbiter.settled(slab, role, self._node.config.launch.phase_timeout_s)
        return m.Done()

    async def _publish(self, order: c.PublishOrder) -> m.Message:
        return await self._parts.workers.publish(order.policy_version, order.probe)

    async def _sync(self, _: c.SyncWeights) -> m.Message:
        await self._parts.workers.sync()
        return m.Done()

    async def _peer_lost(self, order: c.PeerLost) -> None:
        self._parts.lose(order.node, order.why)

    async def _forward(self, order: c.Forward) -> m.Message:
        engines, role = self._parts.engines, order.role
        try:
            completed = await engines.complete(role, order.sample)
        except Bounced as error:
            return c.ForwardBounced(why=str(error), room=engines.room(role), version=engines.version)
        origin = order.sample.request_id.partition("/")[0]
        return c.Forwarded(
            completed=completed, room=engines.room(role), version=engines.version,
            elsewhere=engines.num_under_way(role, but=origin),
        )  # fmt: skip

    async def _forward_abort(self, order: c.ForwardAbort) -> None:
        await self._parts.engines.abort(order.role, order.origin, order.request_ids)

    async def _quit(self, order: c.Quit) -> m.Message:
        if order.exit_code:
            _LOG.warning("this attempt ends here with exit code %d: %s", order.exit_code, order.reason)
        self.exit_code = order.exit_code
        self.quit.set()
        return m.Done()

    async def _status(self, _: c.StatusQuery) -> m.Message:
        leases = {slab.name: self._parts.arbiter.lease(slab) for slab in self._node.slabs}
        text = json.dumps(
            {name: {"stage": lease.stage.value, "holder": lease.holder, "token": lease.token}
             for name, lease in leases.items()}
        )  # fmt: skip
        return c.StatusAnswer(text=text.encode())

    async def on_worker_exit(self, worker: Worker, how: str) -> None:
        """An engine or the reward process is started again when it is wanted; a lost trainer rank ends
        the attempt, since its state is gone."""
        self._parts.workers.forget(worker, how)
        self._parts.arbiter.died(worker)
        if worker.role == TRAINER and not self.quit.is_set():
            assert self._owner is not None, "only owners have trainer ranks"
            self._owner.training.lost(worker, how)
        elif worker.slab is None and not self.quit.is_set():
            self._parts.rewards.ended(worker, how)
            await self._parts.supervisor.start(worker)
