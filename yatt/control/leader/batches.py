"""The leader's part of sampling: orders to trainer nodes, and the batches that they report.

A batch is the prompt groups of one iteration. The sampling track decides when it is sampled.

`yatt.core.phases.sampling_track` decides when batches are sampled and weights are loaded. The acts of the
training track (`yatt.control.leader.phase_work`) wait here for what they need. Without credit
(`rollout.ahead: 0`) a batch is sampled while training waits for it; with credit also while it trains.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from yatt import clock
from yatt.config.schema import RunConfig
from yatt.control.leader.background import Background
from yatt.control.leader.judge_refresh import JudgeRefresh
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.slabs.slabs import Slabs
from yatt.control.node import Node
from yatt.core.gpus.placement import ROLLOUT, Holders
from yatt.core.phases import sampling_track as core
from yatt.core.phases.phases import Phase
from yatt.core.phases.sampling_track import Track, TrackRules
from yatt.core.samples.prompts import share_of_shard
from yatt.errors import WorkerFailed, YattError
from yatt.obs.story.events import EventLog
from yatt.records import cluster as c
from yatt.records.events.attempts import BatchBegan, BatchEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackWork:
    """The work of the track.

    Attributes:
        prepare: readies engines for a batch; a request to stop may come meanwhile.
        sample: samples a batch, or what it lacks, by a policy version; returns whether it is whole.
        load: makes the engines load a policy version.
    """

    prepare: Callable[[int], Awaitable[None]]
    sample: Callable[[int, int], Awaitable[bool]]
    load: Callable[[int], Awaitable[None]]


class SamplingTrack:
    """The sampling track of one attempt."""

    def __init__(self, rules: TrackRules, work: TrackWork, background: Background) -> None:
        self._rules, self._work, self._background = rules, work, background
        self._track = Track()
        self._waiting: asyncio.Future[core.Grant] | None = None

    # ---- asked by the training track ------------------------------------------------------------

    def resumed(self, iteration: int) -> None:
        """Begins after this iteration."""
        self._step(core.TrackResumed(iteration))

    async def batch(self, iteration: int) -> bool:
        """Waits until the iteration's batch is sampled; returns whether it lacks groups.

        Raises:
            WorkerFailed: the run ends early.
        """
        return (await self._granted(core.WantBatch(iteration))).again

    async def may_publish(self) -> None:
        """Waits until weights may change; engines load none until `published`."""
        await self._ask(core.WantPublishing())

    async def published(self, version: int) -> None:
        """Has the engines load this version: without credit at once, else after their present batch."""
        await self._ask(core.VersionPublished(version))

    async def quiet(self) -> None:
        """Waits until engines have the newest version and sample nothing, until `quiet_is_over`.

        Raises:
            WorkerFailed: the run ends early.
        """
        await self._granted(core.WantQuiet())

    def quiet_is_over(self) -> None:
        """Lets the engines sample again."""
        self._step(core.QuietOver())

    def stop(self) -> bool:
        """Begins nothing more; returns whether a batch is being sampled."""
        self._step(core.EndSampling())
        return bool(self._track.sampling)

    async def _granted(self, event: core.Event) -> core.Grant:
        grant = await self._ask(event)
        if grant.is_stopped:
            raise WorkerFailed("sampling has ended, because the run ends early")
        return grant

    async def _ask(self, event: core.Event) -> core.Grant:
        waiting: asyncio.Future[core.Grant] = asyncio.get_running_loop().create_future()
        self._waiting = waiting
        self._step(event)
        return await waiting

    # ---- what follows ---------------------------------------------------------------------------

    def _step(self, event: core.Event) -> None:
        self._track, actions = core.step(self._track, event, self._rules)
        for action in actions:
            match action:
                case core.SampleBatch():
                    self._background.spawn(self._sample(action))
                case core.LoadVersion(version):
                    self._background.spawn(self._load(version))
                case core.Grant() if self._waiting is not None and not self._waiting.done():
                    self._waiting.set_result(action)

    async def _sample(self, order: core.SampleBatch) -> None:
        if self._track.is_stopped:  # nodes were told to end before they were told to begin
            return
        try:
            await self._work.prepare(order.batch)
            if self._track.is_stopped:  # as above, meanwhile
                return
            is_whole = await self._work.sample(order.batch, order.version)
        except YattError:
            if self._track.is_stopped:  # it was broken off
                return
            raise
        self._step(core.Sampled(order.batch, is_whole))

    async def _load(self, version: int) -> None:
        await self._work.load(version)
        self._step(core.Loaded(version))


@dataclass(slots=True)
class Batch:
    """A batch as trainer nodes report it.

    Attributes:
        groups: metadata of the groups, by number.
        counters: new ones, for metrics.
        num_missing: number of groups that it lacks.
        seconds: how long it was sampled.
        judges: whose weights refreshed GenRMs have, for metrics.
    """

    groups: dict[int, c.GroupFact] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    num_missing: int = 0
    seconds: float = 0.0
    judges: dict[str, float] = field(default_factory=dict)

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
        judges: newer weights of GenRMs.
        track: the sampling track, which the training track waits for.
        slabs: the table of slabs.
    """

    def __init__(
        self,
        node: Node,
        clients: NodeClients,
        slabs: Slabs,
        judges: JudgeRefresh,
        events: EventLog,
        background: Background,
    ) -> None:
        self._node, self._clients, self._events, self.slabs = node, clients, events, slabs
        self.judges = judges
        self._sampled: dict[int, Batch] = {}
        work = TrackWork(prepare=judges.begin, sample=self._sample, load=self._load)
        self.track = SamplingTrack(track_rules(node.config), work, background)

    def take(self, iteration: int) -> Batch:
        """Returns what is new of a sampled batch."""
        return self._sampled.pop(iteration)

    async def score(self, iteration: int, scoring: int) -> Batch:
        """Makes every trainer node score as far as the engines of a scoring phase can."""
        began_s, batch = clock.monotonic_s(), Batch(judges=self.judges.metrics())
        self.slabs.begin_sampling(Phase.SCORE, scoring)
        try:
            advanced = await self._advance(iteration, self._node.placement.turns[scoring])
        finally:
            self.slabs.end_sampling()
        batch.add(advanced, clock.monotonic_s() - began_s)
        return batch

    async def _advance(self, iteration: int, holders: Holders) -> list[c.Advanced]:
        size, num_shards = self._node.config.trainer.train_batch_size, len(self._node.placement.trainer_nodes)
        first = (iteration - 1) * size
        orders = [
            c.Advance(
                iteration=iteration,
                policy_version=iteration - 1,
                target=share_of_shard(size, shard=index, num_shards=num_shards, first=first),
                roles=tuple(sorted(set(holders.values()))),
            )
            for index in range(num_shards)
        ]
        return await self._clients.ask_each_trainer_node(orders)

    # ---- work of the track ------------------------------------------------------------------------

    async def _sample(self, iteration: int, version: int) -> bool:
        """Samples a batch; returns whether it is whole, or lacks only scores of later phases."""
        began_s, is_ahead = clock.monotonic_s(), bool(self._node.config.rollout.ahead)
        if is_ahead:
            self._events.emit(BatchBegan(iteration=iteration, policy_version=version))
        self.slabs.begin_sampling()
        takes_turns, sampling = self.slabs.takes_turns, self._node.placement.sampling
        holders = dict.fromkeys(sampling, ROLLOUT) if takes_turns else sampling
        try:
            advanced = await self._advance(iteration, holders)
        finally:
            self.slabs.end_sampling()
            seconds = clock.monotonic_s() - began_s
            if is_ahead:
                self._events.emit(BatchEnded(iteration=iteration, seconds=round(seconds, 6)))
        batch = self._sampled.setdefault(iteration, Batch(judges=self.judges.metrics()))
        batch.add(advanced, seconds)
        return takes_turns or not batch.num_missing

    async def _load(self, _: int) -> None:
        """Makes engines load the published version; those that are woken for the phase load it themselves."""
        placement = self._node.placement
        keepers = placement.pools[ROLLOUT] - set(placement.trainer_nodes)
        await self._clients.ask_nodes(dict.fromkeys(sorted(keepers), c.SyncWeights()))


def track_rules(config: RunConfig) -> TrackRules:
    """Returns the constants of the sampling track."""
    section = config.rollout
    return TrackRules(
        total_iterations=config.trainer.total_iterations,
        ahead=section.ahead,
        max_age=section.max_policy_age,
        has_engines=not config.is_given,
    )
