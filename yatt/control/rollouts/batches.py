"""Collects samples into calls of functions that score several at once (`rewards[].scope: batch`)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from yatt.config.scoring import RewardSection
from yatt.records import message as m

Call = Callable[[m.ScoreMany], Awaitable[m.Message]]


@dataclass(slots=True)
class _Batch:
    items: list[m.Score] = field(default_factory=list)
    is_full: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0


class Batches:
    """The batches of one function.

    A batch is sent when it is full or its time is over. If the function fails on a batch, each sample is
    scored alone, so that one sample that cannot be scored costs no others.
    """

    def __init__(self, reward: RewardSection, call: Call) -> None:
        self._reward, self._call = reward, call
        self._open: tuple[_Batch, asyncio.Task[m.Message]] | None = None

    async def score(self, item: m.Score) -> m.Message:
        """Returns Scored, or Failed with the reason."""
        if self._open is None:
            batch = _Batch()
            self._open = batch, asyncio.create_task(self._send(batch))
        batch, sending = self._open
        place = len(batch.items)
        batch.items.append(item)
        if len(batch.items) >= self._reward.batch_size:
            self._open = None
            batch.is_full.set()
        batch.waiting += 1
        try:
            answer = await asyncio.shield(sending)  # other samples wait for it too
        finally:
            batch.waiting -= 1
        if isinstance(answer, m.Failed) and answer.user and len(batch.items) > 1:
            answer = await self._call(m.ScoreMany(reward=self._reward.name, items=(item,)))
            place = 0
        return answer.scores[place] if isinstance(answer, m.ScoredMany) else answer

    async def _send(self, batch: _Batch) -> m.Message:
        try:
            async with asyncio.timeout(self._reward.batch_wait_s):
                await batch.is_full.wait()
        except TimeoutError:
            if self._open is not None and self._open[0] is batch:
                self._open = None
        if not batch.waiting:
            return m.Failed(error="nobody waits for the batch any more")
        return await self._call(m.ScoreMany(reward=self._reward.name, items=tuple(batch.items)))
