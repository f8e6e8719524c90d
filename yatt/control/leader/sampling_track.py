"""Carries out the decisions of `yatt.core.sampling_track`: the leader samples batches and has weights loaded.

The acts of the training track (`yatt.control.leader.phase_work`) wait here for what they need. Without credit
(`rollout.ahead: 0`) a batch is sampled while training waits for it; with credit also while it trains.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from yatt.control.leader.background import Background
from yatt.core import sampling_track as core
from yatt.core.sampling_track import Track, TrackRules
from yatt.errors import WorkerFailed, YattError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackWork:
    """The work of the track.

    Attributes:
        sample: samples a batch, or what it lacks, by a policy version; returns whether it is whole.
        load: makes the engines load a policy version.
    """

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
            is_whole = await self._work.sample(order.batch, order.version)
        except YattError:
            if self._track.is_stopped:  # it was broken off
                return
            raise
        self._step(core.Sampled(order.batch, is_whole))

    async def _load(self, version: int) -> None:
        await self._work.load(version)
        self._step(core.Loaded(version))
