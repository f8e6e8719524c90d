"""The controller of one node: answers the leader's orders and its workers' messages.

It owns this node's stripe of the prompts, its leases and its processes. It holds no global batch:
samples that another node trains on go there directly, everything else stays here.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec

from yatt.adapters.wire import Channel
from yatt.control.arbiter import Arbiter, Holding
from yatt.control.engines import LocalEngines, Router
from yatt.control.groups import NodeState
from yatt.control.node import Node
from yatt.control.sampling import Sampler
from yatt.control.scoring import Scorer
from yatt.control.supervisor import Supervisor, Worker
from yatt.control.training import NodeTraining
from yatt.control.validation import Validator
from yatt.control.workers import Workers
from yatt.core.lease import Stage
from yatt.core.placement import TRAINER, Slab
from yatt.errors import EXIT_FAILED, YattError
from yatt.obs.events import EventLog
from yatt.records import cluster as c
from yatt.records import message as m

Answer = Awaitable[m.Message | None]


class Parts:
    """A controller's parts, made in the order they need each other."""

    def __init__(
        self, node: Node, hub: Channel, peers: dict[int, Channel], events: EventLog,
        trouble: Callable[[str, int], None], on_exit: Callable[[Worker, str], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.supervisor = Supervisor(node, events, on_exit)
        self.engines = LocalEngines(hub)
        self.workers = Workers(node, self.supervisor, hub, self.engines, events, trouble)
        self.router = Router(node, self.engines, peers)
        self.scorer = Scorer(node.config, self.router.complete, self.workers.reward)
        holding = Holding(wake=self.workers.wake, ask=self.workers.lull)

        def quarantined(slab: Slab, cause: str) -> None:
            # Every slab is the trainer's in its phase, so a run cannot go on without one.
            trouble(f"slab {slab.name} is quarantined: {cause}", EXIT_FAILED)

        self.arbiter = Arbiter(node, self.supervisor, events, holding, quarantined)


class Controller:
    """Carries out orders on one node.

    Args:
        sampler: this node's prompt groups.
        validator: this node's held-out prompts, or None.
    """

    def __init__(
        self, node: Node, parts: Parts, sampler: Sampler, validator: Validator | None,
        training: NodeTraining,
    ) -> None:  # fmt: skip
        self._node, self._parts, self._sampler = node, parts, sampler
        self._validator, self._training = validator, training
        self._acting: asyncio.Task[m.Message] | None = None
        self.quit = asyncio.Event()
        self.exit_code = EXIT_FAILED
        self._orders: dict[type[m.Message], Callable[..., Answer]] = {
            c.StartWorkers: self._start_workers, c.HandOver: self._hand_over,
            c.OpenTrainerStore: training.open_store, c.BuildTrainer: self._build,
            c.Advance: self._advance, c.BreakOffSampling: self._break_off,
            c.ValidateOrder: self._validate, c.TrainOrder: self._train, c.Parcel: training.parcel,
            c.CommitNotice: self._commit, c.SaveOrder: self._save, c.PublishOrder: self._publish,
            c.Forward: self._forward, c.ForwardAbort: self._forward_abort, c.Quit: self._quit,
            c.StatusQuery: self._status,
        }  # fmt: skip

    async def handle(self, sender: str, body: m.Message) -> m.Message | None:
        """An order of the leader, or a peer's message. What fails is answered by Failed."""
        try:
            return await self._orders[type(body)](body)
        except YattError as error:
            return c.OrderFailed(error=str(error), exit_code=error.exit_code)
        except asyncio.CancelledError:
            error_text = f"{type(body).__name__} from {sender} was broken off"
            return c.OrderFailed(error=error_text, exit_code=EXIT_FAILED)

    async def from_worker(self, sender: str, body: m.Message) -> m.Message | None:
        """A message of one of this node's workers; a dead start's last words are ignored."""
        worker = self._parts.supervisor.by_wire(sender.partition("/")[0])
        if worker is None:
            return None
        match body:
            case m.Hello():
                worker.hello_bytes = self._parts.arbiter.weigh(worker)
                worker.hello.set()
            case m.Renew():
                self._parts.arbiter.renewed(worker, body.token, body.progress)
            case m.Completed():
                self._parts.engines.completed(sender, body)
            case m.Ask():
                return await self._asked(body)
        return None

    async def _asked(self, ask: m.Ask) -> m.Message:
        """A reward function's GenRM client."""
        genrm = next((g for g in self._node.config.genrms if g.name == ask.genrm), None)
        if genrm is None:
            return m.Failed(error=f"there is no GenRM '{ask.genrm}' in this run", user=True)
        try:
            completed = await self._parts.scorer.ask_genrm(genrm, ask)
        except YattError as error:
            return m.Failed(error=str(error))
        if completed.finish_reason == "error":
            return m.Failed(error=completed.error)
        text = self._parts.scorer.text_of(genrm, completed)
        return m.Answered(text=text, finish_reason=completed.finish_reason)

    async def _start_workers(self, _: c.StartWorkers) -> m.Message:
        workers = list(self._parts.supervisor.workers.values())
        for worker in workers:
            self._parts.supervisor.start(worker)
        await asyncio.gather(*(self._parts.supervisor.ready(w) for w in workers))
        return m.Done()

    async def _hand_over(self, order: c.HandOver) -> m.Message:
        arbiter, holders = self._parts.arbiter, dict(order.holders)
        wanted: dict[Slab, str] = {}
        for slab in self._node.slabs:
            role = holders.get(slab.index, "")
            kept = arbiter.lease(slab).holder == role and arbiter.lease(slab).stage is Stage.HELD
            wanted[slab] = role if order.part == "enter" or kept else ""
            arbiter.want(slab, wanted[slab])
        limit_s = self._node.config.launch.phase_timeout_s
        for slab, role in wanted.items():
            await arbiter.settled(slab, role, limit_s)
        return m.Done()

    async def _build(self, order: c.BuildTrainer) -> m.Message:
        await self._training.build(order)
        if order.state:
            self._sampler.restore(msgspec.json.decode(order.state, type=NodeState))
        return m.Done()

    async def _advance(self, order: c.Advance) -> m.Message:
        async def act() -> m.Message:
            await self._sampler.advance(order)
            return self._sampler.advanced(order.target)

        return await self._act(act())

    async def _validate(self, _: c.ValidateOrder) -> m.Message:
        assert self._validator is not None, "only asked for when configured"
        return await self._act(self._validator.run())

    async def _act(self, work: "Awaitable[m.Message]") -> m.Message:
        self._acting = asyncio.ensure_future(work)
        try:
            return await self._acting
        finally:
            self._acting = None

    async def _break_off(self, _: c.BreakOffSampling) -> m.Message:
        await self._sampler.break_off()
        acting = self._acting
        if acting is not None:
            done, _pending = await asyncio.wait({acting}, timeout=self._node.config.lease.ask_s)
            if not done:
                acting.cancel()
        return m.Done()

    async def _train(self, order: c.TrainOrder) -> m.Message:
        numbers = {fact.prompt_group for fact in order.facts}
        mine = [g for g in self._sampler.chosen(len(numbers)) if g.number in numbers]
        return await self._training.train(order, mine)

    async def _commit(self, order: c.CommitNotice) -> m.Message:
        if self._node.is_leader:
            self._sampler.show(set(order.numbers), order.iteration)
        self._sampler.trained(set(order.numbers))
        return m.Done()

    async def _save(self, order: c.SaveOrder) -> m.Message:
        return await self._training.save(order, msgspec.json.encode(self._sampler.state()))

    async def _publish(self, order: c.PublishOrder) -> m.Message:
        return await self._parts.workers.publish(order.policy_version, order.probe)

    async def _forward(self, order: c.Forward) -> m.Message:
        limit_s = self._node.config.rollout.request_timeout_s
        return await self._parts.engines.complete(order.role, order.sample, limit_s)

    async def _forward_abort(self, order: c.ForwardAbort) -> None:
        await self._parts.engines.abort(order.role, order.origin)

    async def _quit(self, order: c.Quit) -> m.Message:
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
            self._training.lost(worker, how)
        elif worker.slab is None and not self.quit.is_set():
            self._parts.supervisor.start(worker)
