"""The leader's part of sampling: orders to trainer nodes, and the batches that they report.

A batch is the prompt groups of one iteration. The sampling track decides when it is sampled.
"""

from dataclasses import dataclass, field

from yatt import clock
from yatt.config.schema import RunConfig
from yatt.control.leader.background import Background
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.sampling_track import SamplingTrack, TrackWork
from yatt.control.leader.slabs import Slabs
from yatt.control.node import Node
from yatt.core.phases import Phase
from yatt.core.placement import ROLLOUT, Holders
from yatt.core.prompts import share
from yatt.core.sampling_track import TrackRules
from yatt.obs.events import EventLog
from yatt.records import cluster as c


@dataclass(slots=True)
class Batch:
    """A batch as trainer nodes report it.

    Attributes:
        groups: metadata of the groups, by number.
        counters: new ones, for metrics.
        num_missing: number of groups that it lacks.
        seconds: how long it was sampled.
    """

    groups: dict[int, c.GroupFact] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    num_missing: int = 0
    seconds: float = 0.0

    def add(self, advanced: list[c.Advanced], seconds: float) -> None:
        """Adds the trainer nodes' reports: each has all groups that its node has chosen, and new counters."""
        self.groups = {group.number: group for answer in advanced for group in answer.groups}
        for answer in advanced:
            for name, number in answer.counters.items():
                self.counters[name] = self.counters.get(name, 0.0) + number
        self.num_missing = sum(answer.missing for answer in advanced)
        self.seconds += seconds


class BatchSampling:
    """Samples batches.

    Args:
        background: runs the sampling track.

    Attributes:
        track: the sampling track, which the training track waits for.
        slabs: the table of slabs.
    """

    def __init__(
        self, node: Node, clients: NodeClients, slabs: Slabs, events: EventLog, background: Background
    ) -> None:
        self._node, self._clients, self._events, self.slabs = node, clients, events, slabs
        self._sampled: dict[int, Batch] = {}
        work = TrackWork(sample=self._sample, load=self._load)
        self.track = SamplingTrack(track_rules(node.config), work, background)

    def take(self, iteration: int) -> Batch:
        """Returns what is new of a sampled batch."""
        return self._sampled.pop(iteration)

    async def score(self, iteration: int, scoring: int) -> Batch:
        """Makes every trainer node score as far as the engines of a scoring phase can."""
        began_s, batch = clock.monotonic_s(), Batch()
        self.slabs.begin_sampling(Phase.SCORE, scoring)
        try:
            advanced = await self._advance(iteration, self._node.placement.scoring[scoring])
        finally:
            self.slabs.end_sampling()
        batch.add(advanced, clock.monotonic_s() - began_s)
        return batch

    async def _advance(self, iteration: int, holders: Holders) -> list[c.Advanced]:
        size, num_shards = self._node.config.trainer.train_batch_size, len(self._node.placement.trainer_nodes)
        first = (iteration - 1) * size
        orders = [
            c.Advance(
                iteration=iteration, policy_version=iteration - 1,
                target=share(size, shard=index, num_shards=num_shards, first=first),
                roles=tuple(sorted(set(holders.values()))),
            )
            for index in range(num_shards)
        ]  # fmt: skip
        return await self._clients.ask_each_trainer_node(orders)

    # ---- work of the track ------------------------------------------------------------------------

    async def _sample(self, iteration: int, version: int) -> bool:
        """Samples a batch; returns whether it is whole, or lacks only scores of later phases."""
        began_s, is_ahead = clock.monotonic_s(), bool(self._node.config.rollout.ahead)
        if is_ahead:
            self._events.emit("batch.begin", iteration=iteration, policy_version=version)
        self.slabs.begin_sampling()
        try:
            advanced = await self._advance(iteration, self._node.placement.sampling)
        finally:
            self.slabs.end_sampling()
            seconds = clock.monotonic_s() - began_s
            if is_ahead:
                self._events.emit("batch.end", iteration=iteration, seconds=round(seconds, 6))
        batch = self._sampled.setdefault(iteration, Batch())
        batch.add(advanced, seconds)
        return bool(self._node.placement.scoring) or not batch.num_missing

    async def _load(self, _: int) -> None:
        """Makes engines load the published version; those that are woken for the phase load it themselves."""
        placement = self._node.placement
        keepers = placement.pools[ROLLOUT] - set(placement.trainer_nodes)
        await self._clients.ask_nodes(dict.fromkeys(sorted(keepers), c.SyncWeights()))


def track_rules(config: RunConfig) -> TrackRules:
    """Returns the constants of the sampling track."""
    section = config.rollout
    return TrackRules(
        total_iterations=config.trainer.total_iterations, ahead=section.ahead, max_age=section.max_policy_age
    )
