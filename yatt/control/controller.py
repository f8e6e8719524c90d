"""The controller of one node: answers the leader's orders and its workers' messages.

It manages its node's leases and processes, and on a trainer node also a data shard
(`yatt.control.trainer_node`). It holds no global batch: samples that another node trains on are sent to that
node directly.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

from yatt.adapters.files.patience import exit_code_of
from yatt.adapters.net.crowd import Spawned
from yatt.control.components import Components
from yatt.control.gpus.engines import Bounced
from yatt.control.gpus.processes.host_memory import node_memory
from yatt.control.gpus.processes.worker_plan import MEDIA, REWARD, UPLOADER, Worker
from yatt.control.gpus.workers import MOST_DEATHS
from yatt.control.node import Node
from yatt.control.rollouts.evaluator import Evaluator
from yatt.control.trainer_node import TrainerNode
from yatt.control.training import lost_rank
from yatt.core.gpus.lease import Stage
from yatt.core.gpus.placement import ROLLOUT, TRAINER, Holders, Slab
from yatt.core.requests.peer_name import parsed_peer
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, WorkerFailed, YattError
from yatt.records import cluster as c, message as m
from yatt.records.moves import LoadAnswer, LoadQuery, MoveSlab, SlabMoved
from yatt.records.weights import UseJudges

_LOG = logging.getLogger(__name__)
Answer = Awaitable[m.Message | None]


class Controller:
    """Carries out orders on one node.

    Args:
        trainer_node: the additional orders of a node with trainer ranks, or with prompts of an evaluation;
            None on an engine node.
    """

    def __init__(self, node: Node, parts: Components, trainer_node: TrainerNode | Evaluator | None) -> None:
        self._node, self._parts, self._trainer_node = node, parts, trainer_node
        self._tasks = Spawned()
        self._seq = 0  # of the newest barrier
        self._moving: dict[Slab, str] = {}  # slabs that are moved now, and the role that gets them
        self.quit = asyncio.Event()
        self.exit_code = EXIT_FAILED
        self._orders: dict[type[m.Message], Callable[..., Answer]] = {
            c.StartWorkers: self._start_workers,
            c.SwitchSlabs: self._switch_slabs,
            m.Publish: self._publish,
            c.DescribeWeights: parts.given_weights.describe,
            c.OfferWeights: parts.given_weights.offer,
            c.TakeWeights: parts.publications.take,
            c.SyncWeights: self._sync,
            UseJudges: parts.judges.use,
            c.Forward: self._forward,
            c.ForwardAbort: self._forward_abort,
            MoveSlab: self._move_slab,
            LoadQuery: self._load,
            c.GrantSlabs: self._grant_slabs,
            c.PeerJoined: self._peer_joined,
            c.Roster: self._admitted,
            c.PeerLost: self._peer_lost,
            c.Quit: self._quit,
            c.StatusQuery: self._status,
            **(trainer_node.orders if trainer_node is not None else {}),
        }

    async def handle(self, sender: str, body: m.Message) -> m.Message | None:
        """Handles an order of the leader, or a peer's message. A failure is answered by Failed."""
        if isinstance(body, c.EngineRoom):
            who = parsed_peer(sender, self._node.config.launch.nodes)
            assert who is not None, "the session passes only messages of this run's nodes"
            self._parts.router.room(body.role, who[0], body.room, body.version)
            return m.Done()
        if (order := self._orders.get(type(body))) is None:
            return m.Failed(error=f"{type(body).__name__} is no order for this node", exit_code=EXIT_FAILED)
        try:
            return await order(body)
        except YattError as error:
            return m.Failed(error=str(error), exit_code=exit_code_of(error))
        except asyncio.CancelledError:
            error_text = f"{type(body).__name__} from {sender} was interrupted"
            return m.Failed(error=error_text, exit_code=EXIT_FAILED)
        except OSError as error:  # a filesystem failed: another attempt may succeed
            says = f"{error.filename or 'writing'}: {error.strerror or error}"
            return m.Failed(error=says, exit_code=EXIT_FAILED)
        except Exception as error:  # noqa: BLE001 (answered, or the asker would wait out its deadline)
            _LOG.exception("a defect in answering %s", type(body).__name__)
            return m.Failed(error=f"a defect at {type(body).__name__}: {error!r}", exit_code=EXIT_FAILED)

    async def from_worker(self, sender: str, body: m.Message) -> m.Message | None:
        """Handles a message of one of this node's workers; messages of ended processes are ignored."""
        worker = self._parts.supervisor.by_address(sender.partition("/")[0])
        if worker is None:
            return None
        match body:
            case m.Failed() if body.user:
                self._parts.reports.failed(f"{worker.name}: {body.error}", EXIT_USER_MISTAKE)
            case m.Renew():
                worker.work = body.work
                if body.steps.steps:
                    self._parts.meter.stepped(worker, body.steps)
                self._parts.supervisor.waits(worker, body.waits_for)
                self._parts.arbiter.renewed(worker, body.token, body.turns + body.work)
            case m.Completed():
                self._parts.engines.completed(sender, body)
            case m.RewardsStuck():
                self._parts.rewards.stuck(worker, body)
            case m.Ask() if self._trainer_node is not None:
                return await self._trainer_node.asked(body)
            case _:
                self._started(worker, body)
        return None

    def _started(self, worker: Worker, body: m.Message) -> None:
        """Handles the first messages of a worker's process."""
        match body:
            case m.RewardsLoaded():
                self._parts.rewards.loaded(body)
            case m.Hello():
                worker.process.hello_bytes = self._parts.arbiter.weigh(worker)
                worker.process.hello.set()
                self._parts.supervisor.nurseries.came_up(worker)
                if worker.role == REWARD:
                    self._parts.rewards.ready(worker)

    async def _start_workers(self, _: c.StartWorkers) -> m.Message:
        await self._parts.judges.begin()
        placement = self._node.placement  # engines that a slab may have later start at the first move
        first = placement.first_roles_of if self._node.config.trains else _only_of(placement.sampling)
        workers = [
            worker
            for worker in self._parts.supervisor.workers.values()
            if worker.slab is None or worker.role in first(worker.slab)
        ]
        await asyncio.gather(*(self.first_start(worker) for worker in workers))
        return m.Done()

    async def first_start(self, worker: Worker) -> None:
        """Starts a worker and waits until it accepts orders. An engine or reward process that is killed
        meanwhile is started again, as at any later start.

        Raises:
            WorkerFailed, DeadlineExceeded: it does not start.
        """
        supervisor = self._parts.supervisor
        for left in reversed(range(MOST_DEATHS)):
            await supervisor.start(worker)
            address = worker.address
            try:
                return await supervisor.ready(worker)
            except WorkerFailed:
                is_final = worker.role == TRAINER or not supervisor.was_killed(address)
                if is_final or not left or self.quit.is_set():
                    raise

    async def _switch_slabs(self, order: c.SwitchSlabs) -> m.Message:
        arbiter, holders = self._parts.arbiter, dict(order.holders)
        self._seq = max(self._seq, order.seq)
        wanted: dict[Slab, str] = {}
        for slab in self._node.slabs:
            role = holders.get(slab.index, "")
            if self._moving.get(slab) == role:
                continue  # its order brings it there; engines that are built take long
            kept = arbiter.lease(slab).holder == role and arbiter.lease(slab).stage is Stage.HELD
            wanted[slab] = role if order.part == "enter" or kept else ""
            arbiter.want(slab, wanted[slab])
        for slab, role in wanted.items():
            await arbiter.settled(slab, role, self._node.config.launch.phase_timeout_s)
        if order.part == "prepare" and not self._node.config.trains:  # each role has one turn
            workers = self._parts.supervisor.workers.values()
            await self._parts.supervisor.retire(w for w in workers if w.is_engine and w.process.is_asleep)
        return m.Done()

    async def _move_slab(self, order: MoveSlab) -> m.Message:
        if order.seq < self._seq:
            return SlabMoved(has_moved=False)
        slab = next(each for each in self._node.slabs if each.index == order.slab)
        meter, arbiter, unfit = self._parts.meter, self._parts.arbiter, self._parts.unfit
        before_s, has_moved = meter.spent_s(slab), False
        if (slab, order.role) not in unfit:
            arbiter.want(slab, order.role)
            self._moving[slab] = order.role
            try:
                has_moved = await arbiter.settled(slab, order.role, self._node.config.launch.phase_timeout_s)
            finally:
                self._moving.pop(slab, None)
        is_unfit = (slab, order.role) in unfit
        return SlabMoved(has_moved=has_moved, is_unfit=is_unfit, workers_s=meter.spent_s(slab) - before_s)

    async def _load(self, _: LoadQuery) -> m.Message:
        memory = await node_memory(self._parts.supervisor)
        load = self._parts.load()
        return LoadAnswer(node=self._node.index, life=self._node.life, load=load, memory=memory)

    async def _grant_slabs(self, order: c.GrantSlabs) -> m.Message:
        holders = dict(order.holders)
        for slab in self._node.slabs:
            self._parts.arbiter.want(slab, holders.get(slab.index, ""))
        return m.Done()

    async def _publish(self, order: m.Publish) -> m.Message:
        await self._parts.uploads.publishing(order.policy_version)
        return await self._parts.workers.publish(order)

    async def _sync(self, _: c.SyncWeights) -> m.Message:
        await self._parts.workers.sync()
        self._parts.rooms.open(ROLLOUT)
        return m.Done()

    async def _peer_lost(self, order: c.PeerLost) -> None:
        self._parts.peers.exclude(order.node, order.why, order.life)

    async def _peer_joined(self, order: c.PeerJoined) -> m.Message:
        self._parts.peers.admit(order.node, order.life, order.address)
        return m.Done()

    async def _admitted(self, order: c.Roster) -> m.Message:
        """This newcomer takes part from now on. Its rollout engines take no requests before the next sync."""
        peers = self._parts.peers
        for each in order.joined:
            if each.node != self._node.index:
                peers.admit(each.node, each.life, each.address)
        for index in set(order.lost) - peers.lost:
            peers.exclude(index, "is lost", peers.life(index))
        await self._parts.judges.use(UseJudges(folders=order.judges))
        awaited = {ROLLOUT} if self._node.config.trains else set[str]()
        self._parts.rooms.open(*(set(self._node.placement.pools) - awaited))
        return m.Done()

    async def _forward(self, order: c.Forward) -> m.Message:
        engines, role = self._parts.engines, order.role
        try:
            completed = await engines.complete(role, order.sample)
        except Bounced as error:
            return c.ForwardBounced(why=str(error), room=engines.room(role), version=engines.version)
        origin = order.sample.request_id.partition("/")[0]
        return c.Forwarded(
            completed=completed,
            room=engines.room(role),
            version=engines.version,
            elsewhere=engines.num_under_way(role, but=origin),
        )

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
            {
                name: {"stage": lease.stage.value, "holder": lease.holder, "token": lease.token}
                for name, lease in leases.items()
            }
        )
        return c.StatusAnswer(text=text.encode())

    async def watch_exits(self) -> None:
        """Handles the end of worker processes, forever."""
        while True:
            worker, how = await self._parts.supervisor.exits.get()
            self._ended(worker, how)

    def _ended(self, worker: Worker, how: str) -> None:
        """Handles the end of a worker. An engine or a reward process is started again when it is wanted. A
        lost trainer rank ends the attempt, since its state is lost."""
        self._parts.workers.forget(worker, how)
        self._parts.arbiter.died(worker)
        if self.quit.is_set():
            return
        if worker.role == TRAINER:
            error, is_symptom = lost_rank(self._node, worker, how)
            self._parts.reports.failed(error, EXIT_FAILED, is_symptom)
        elif worker.role == UPLOADER:
            self._parts.uploads.ended(worker)
        elif worker.role == MEDIA:
            self._parts.media.ended(worker, how)
        elif worker.slab is None:
            self._parts.rewards.ended(worker, how)
            self._tasks.spawn(self._parts.supervisor.start(worker))


def _only_of(holders: Holders) -> Callable[[Slab], tuple[str, ...]]:
    return lambda slab: (holders[slab],)
