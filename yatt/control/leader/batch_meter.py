"""The event of each batch's load: speeds, lengths and idle time. `yatt simulate` reads it."""

import asyncio
from collections.abc import Mapping, Sequence

from yatt.config.check import engines_per_slab, max_num_seqs
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.slabs.measured import BatchLengths
from yatt.control.leader.slabs.slabs import Slabs
from yatt.control.node import Node
from yatt.core.figures.efficiency import engine_metrics, memory_metrics
from yatt.errors import YattError
from yatt.obs.story.events import EventLog
from yatt.records import cluster as c
from yatt.records.events.slabs import BatchMeasured, RoleMeasured
from yatt.records.load import StepSums
from yatt.records.moves import LoadAnswer, LoadQuery
from yatt.records.usage import NodeMemory

ASK_S = 10.0
"""Longest wait for a node's sums without progress there."""

_DROPPED = ("rollout/dropped_groups", "rollout/failed_groups")


class BatchMeter:
    """Measures each batch when it is trained on."""

    def __init__(self, node: Node, clients: NodeClients, slabs: Slabs, events: EventLog) -> None:
        self._node, self._clients, self._slabs, self._events = node, clients, slabs, events
        self._num_dropped = self._sampled_s = 0.0
        self._trained_s = 0.0

    def sampled(self, counters: dict[str, float], seconds: float) -> None:
        """Adds a part of the batch."""
        self._num_dropped += sum(counters.get(name, 0.0) for name in _DROPPED)
        self._sampled_s += seconds

    def trained(self, seconds: float) -> None:
        """Adds time in which the training track trains, saves, publishes or loads weights."""
        self._trained_s += seconds

    async def batch_over(self, iteration: int, groups: Sequence[c.GroupFact]) -> dict[str, float]:
        """Emits the event; returns metrics. The next batch is sampled by what was measured."""
        memory = await self._ask_loads()
        facts = [fact for group in groups for fact in group.samples]
        num_groups = len(groups) + int(self._num_dropped)
        lengths = tuple(fact.num_completion_tokens for fact in facts)
        batch = BatchLengths(lengths=lengths, num_samples=num_groups * self._node.config.rollout.n)
        measured, held_s = self._slabs.measured, self._slabs.orders.held.take()
        measured.batch_over(batch)
        counts = self._slabs.counts()
        roles = {role: self._role(role, num, held_s.get(role, 0.0)) for role, num in counts.items()}
        self._events.emit(
            BatchMeasured(
                iteration=iteration,
                seconds=round(self._sampled_s, 6),
                num_samples=batch.num_samples,
                lengths=batch.quantiles(),
                verdicts=measured.tokens,
                questions=measured.questions,
                roles=roles,
                switch_s=round(measured.switch_s()[0], 6),
                train_s=round(self._trained_s, 6),
                kept=len(groups) / max(num_groups, 1),
            )
        )
        self._num_dropped = self._sampled_s = self._trained_s = 0.0
        if iteration < self._node.config.trainer.total_iterations:
            self._slabs.batch_over()
        idle = {f"placement/idle/{role}": each.idle for role, each in roles.items() if each.idle is not None}
        throughput = engine_metrics(
            {role: sums.running for role, sums in measured.last.items()}, self._gpu_s(held_s)
        )
        return {**self._slabs.metrics(), **idle, **throughput, **memory_metrics(memory)}

    def _gpu_s(self, held_s: Mapping[str, float]) -> dict[str, float]:
        """Returns the seconds times GPUs of each role, from its seconds times slabs."""
        placement = self._node.placement
        width = {role: len(slab.gpus) for slab in placement.slabs for role in placement.roles_of(slab)}
        return {role: seconds * width[role] for role, seconds in held_s.items()}

    async def _ask_loads(self) -> list[NodeMemory]:
        """Asks all nodes for the newest sums; returns their memory. A node that does not answer is not judged
        here: its last keep-alive message counts."""
        memory = []
        nodes = (n for n in range(self._node.config.launch.nodes) if not self._clients.is_lost(n))
        asked = (self._clients.ask(index, LoadQuery(), ASK_S) for index in nodes)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, LoadAnswer):
                self._slabs.measured.loads.put(answer.node, answer.life, answer.load)
                memory.append(answer.memory)
            elif not isinstance(answer, YattError):
                raise answer
        return memory

    def _role(self, role: str, num_slabs: int, held_s: float) -> RoleMeasured:
        measured = self._slabs.measured
        speed, busy_s = measured.speeds.get(role), measured.last.get(role, StepSums()).seconds
        engines, span = engines_per_slab(self._node.config, role), self._node.placement.spans[role]
        engine_s = held_s * engines / span
        return RoleMeasured(
            step_s=speed.step_s if speed else None,
            sequence_s=speed.sequence_s if speed else None,
            room=max_num_seqs(self._node.config, role),
            engines=engines,
            slabs=num_slabs,
            span=span,
            busy_s=round(busy_s, 6),
            held_s=round(engine_s, 6),
            idle=round(max(0.0, 1 - busy_s / engine_s), 6) if engine_s else None,
        )
