"""The part of a controller on trainer nodes: prompt groups, held-out prompts, training.

A node without it has no part of a checkpoint, and the run can continue when it is lost.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from msgspec import structs

from yatt.adapters.processes.thread_call import call_in_thread
from yatt.checkpoint.commit.run_store import Stores
from yatt.checkpoint.local.local_store import LocalStore
from yatt.checkpoint.local.local_tier import LocalTier
from yatt.control.node import Node
from yatt.control.rollouts.given import GivenGroups
from yatt.control.rollouts.groups.carried import frozen_state, read_state, write_state
from yatt.control.rollouts.groups.groups import NodeState
from yatt.control.rollouts.sampling import Sampler
from yatt.control.rollouts.scoring.asking import answered_by
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.validation import Validator
from yatt.control.training import NodeTraining
from yatt.core.attempts.checkpoint_names import node_state_path
from yatt.errors import CheckpointError, WorkerFailed
from yatt.records import cluster as c, message as m
from yatt.records.shards import StateFile

Answer = Awaitable[m.Message | None]


class TrainerNode:
    """Carries out a trainer node's orders.

    Args:
        sampler: this node's prompt groups, sampled or given.
        validator: this node's held-out prompts, or None.
        stores: the checkpoint stores with this node's part.
    """

    def __init__(
        self,
        node: Node,
        sampler: Sampler | GivenGroups,
        validator: Validator | None,
        training: NodeTraining,
        judge: Judge,
        stores: Stores,
    ) -> None:
        self._stores, self._local = stores, LocalStore(partial(LocalTier.of, node.config))
        self._frozen = 0, NodeState(next_number=0)
        self._node, self._sampler, self._validator = node, sampler, validator
        self._judge = judge
        self.training = training
        self._acting: set[asyncio.Task[m.Message]] = set()
        self.orders: dict[type[m.Message], Callable[..., Answer]] = {
            c.OpenTrainerStore: training.open_store,
            c.BuildTrainer: self._build,
            c.RestoreTrainer: self._restore,
            c.Advance: self._advance,
            c.BreakOffSampling: self._break_off,
            c.ValidateOrder: self._validate,
            c.OpenHeldOut: self._open_held_out,
            c.ShowPictures: self._show,
            c.LeaveOut: self._leave_out,
            c.TrainOrder: self._train,
            c.SampleTransfer: training.receive,
            c.CommitNotice: self._commit,
            m.TakeSnapshot: self._take_snapshot,
            m.Upload: self._upload,
            **{kind: training.pass_on for kind in m.Order.__subclasses__() if kind.passes_to_ranks},
        }

    async def asked(self, ask: m.Ask) -> m.Message:
        """Handles a request of a reward function's GenRM client."""
        return await answered_by(self._judge, self._node.config, ask)

    async def _build(self, order: c.BuildTrainer) -> m.Message:
        await self.training.build(order)
        return m.Done()

    async def _restore(self, order: c.RestoreTrainer) -> m.Message:
        restored = await self.training.restore(order)
        # Another node may still report a fault; then an older state replaces this one.
        if order.states and not restored.fault:
            try:
                state = await call_in_thread(partial(self._read_state, order))
            except CheckpointError as error:
                return m.Restored(fault=str(error))
            if order.is_origin:  # its groups belong to its own data, rewards and lengths
                state = NodeState(next_number=state.next_number)
            self._sampler.restore(state)
        if not restored.fault:
            kind = "origin/" if order.is_origin else ""
            self._sampler.restored(f"{kind}{order.weights}")
        return restored

    def _read_state(self, order: c.RestoreTrainer) -> NodeState:
        trainer_nodes = self._node.placement.trainer_nodes
        store = self._local if order.is_local else self._stores.of(is_origin=order.is_origin)
        shard = trainer_nodes.index(self._node.index)
        return read_state(store, order.states, shard=shard, num_shards=len(trainer_nodes))

    async def _advance(self, order: c.Advance) -> m.Message:
        async def act() -> m.Message:
            await self._sampler.advance(order)
            return self._sampler.advanced(order.target)

        return await self._act(act())

    async def _validate(self, _: c.ValidateOrder) -> m.Message:
        assert self._validator is not None, "only asked for when configured"
        return await self._act(self._validator.run())

    async def _act(self, work: Coroutine[Any, Any, m.Message]) -> m.Message:
        acting = asyncio.get_running_loop().create_task(work)
        self._acting.add(acting)
        try:
            return await acting
        finally:
            self._acting.discard(acting)

    async def _break_off(self, _: c.BreakOffSampling) -> m.Message:
        await self._sampler.break_off()
        if self._acting:
            limit_s = self._node.config.lease.release_s
            _done, pending = await asyncio.wait(self._acting, timeout=limit_s)
            for acting in pending:
                acting.cancel()
        return m.Done()

    async def _open_held_out(self, _: c.OpenHeldOut) -> m.Message:
        assert isinstance(self._sampler, GivenGroups), "only asked for where completions are given"
        return await self._sampler.held_out.opened()

    async def _show(self, order: c.ShowPictures) -> m.Message:
        return await self.training.show(order, self._sampler.groups_of(set(order.numbers)))

    async def _leave_out(self, order: c.LeaveOut) -> m.Message:
        assert isinstance(self._sampler, Sampler), "only asked for in runs with pictures"
        self._sampler.leave_out(order.reasons, order.iteration)
        return m.Done()

    async def _train(self, order: c.TrainOrder) -> m.Message:
        numbers = {fact.prompt_group for fact in order.facts}
        if order.is_held_out and isinstance(self._sampler, GivenGroups):
            return await self.training.train(order, self._sampler.held_out.groups_of(numbers))
        answer = await self.training.train(order, self._sampler.groups_of(numbers))
        if not isinstance(answer, c.TrainedNode):
            return answer
        epoch = self._sampler.shard.data_epoch(max(numbers))
        return structs.replace(answer, metrics={**answer.metrics, "training/epoch": epoch})

    async def _commit(self, order: c.CommitNotice) -> m.Message:
        self._sampler.record(set(order.numbers), order.iteration, self.training.advantages)
        self._sampler.trained(set(order.numbers), order.iteration)
        return m.Done()

    async def _take_snapshot(self, order: m.TakeSnapshot) -> m.Message:
        """Takes the state of ranks and prompt groups after an iteration; can be repeated."""
        self._frozen = order.iteration, frozen_state(self._sampler.state())
        self._sampler.saved(order.iteration)
        return await self.training.take_snapshot(order)

    async def _upload(self, order: m.Upload) -> m.Message:
        """Writes the last snapshot to the store, in the background of later phases; or to the local tier."""
        iteration, state = self._frozen
        if iteration != order.iteration:
            raise WorkerFailed(f"there is no snapshot of iteration {order.iteration}, but of {iteration}")
        path = node_state_path(order.url, self._node.index)

        def write() -> StateFile:
            store = self._local if order.is_local else self._stores.of(is_origin=False)
            return write_state(store, path, state)

        uploaded = await self.training.upload(order)
        return structs.replace(uploaded, state=await call_in_thread(write), host=os.uname().nodename)
