"""Segments of weights between nodes: the trainer node gives ranges, the engine node fills its own segment.

The engine node's segment is allocated once per attempt and is overwritten by each version. It is stamped like
the trainer's (`yatt.adapters.host_segment`), so engines read it in the same way: one version, or a refusal.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.host_segment import (
    SegmentReader,
    SegmentWriter,
    Stamp,
    segment_path,
    weight_plan_path,
)
from yatt.adapters.thread_call import call_in_thread
from yatt.control.gpus.uploads import host_stem
from yatt.control.node import Node
from yatt.errors import WorkerFailed
from yatt.records import cluster as c, message as m

AREA = "weights"
PIECE_BYTES = 8 << 20
PIECES_AHEAD = 4
Ask = Callable[[m.Order[Any]], Awaitable[Any]]


class GivenWeights:
    """The weights of this node's trainer ranks, for other nodes."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._readers: dict[int, SegmentReader] = {}

    async def describe(self, order: c.DescribeWeights) -> m.Message:
        """Returns what a rank's host copy contains."""
        described: m.Message = await call_in_thread(partial(self._describe, order.rank))
        return described

    async def read(self, order: c.ReadWeights) -> m.Message:
        """Returns a range of a rank's weights.

        Raises:
            WorkerFailed: they are not of that policy version, or were changed meanwhile.
        """
        return c.Piece(data=await call_in_thread(partial(self._read, order)))

    def _describe(self, rank: int) -> c.WeightsDescribed:
        stem = host_stem(self._node, rank)
        try:
            plan = weight_plan_path(stem).read_bytes()
        except OSError as error:
            raise WorkerFailed(f"trainer rank {rank} has no host copy here: {error.strerror}") from error
        return c.WeightsDescribed(plan=plan, size_bytes=len(self._reader(rank).data))

    def _read(self, order: c.ReadWeights) -> bytes:
        reader = self._reader(order.rank)
        stamp = Stamp(self._node.attempt, order.policy_version)
        reader.check(stamp)
        data = bytes(reader.data[order.offset : order.offset + order.num_bytes])
        reader.check(stamp)
        return data

    def _reader(self, rank: int) -> SegmentReader:
        if rank not in self._readers:
            self._readers[rank] = SegmentReader(segment_path(host_stem(self._node, rank), AREA))
        return self._readers[rank]


class FetchedWeights:
    """This node's copy of the weights of a trainer rank of another node.

    Args:
        ask: sends a request to the node of the rank.
    """

    def __init__(self, node: Node, rank: int, ask: Ask) -> None:
        self._rank, self._attempt, self._ask = rank, node.attempt, ask
        self.stem = node.weights_root / f"fetched-{rank:05d}"
        self._segment: SegmentWriter | None = None

    async def fetch(self, policy_version: int) -> int:
        """Fetches a version; returns the number of bytes.

        Raises:
            WorkerFailed: the source does not have it, or is lost.
            OSError: no room.
        """
        segment = self._segment or await self._allocate()
        segment.invalidate()
        at = 0
        async for data in self._pieces(policy_version, len(segment.data)):
            await call_in_thread(partial(_put, segment.data, at, data))
            at += len(data)
        if at != len(segment.data):
            raise WorkerFailed(f"trainer rank {self._rank} gave {at} of {len(segment.data)} bytes of weights")
        segment.complete(Stamp(self._attempt, policy_version))
        return at

    async def _allocate(self) -> SegmentWriter:
        told = await self._ask(c.DescribeWeights(rank=self._rank))
        path, plan_path = segment_path(self.stem, AREA), weight_plan_path(self.stem)
        await call_in_thread(partial(_write_plan, plan_path, told.plan))
        self._segment = await call_in_thread(partial(SegmentWriter, path, told.size_bytes))
        return self._segment

    async def _pieces(self, policy_version: int, size_bytes: int) -> AsyncIterator[bytes]:
        """Yields the bytes in order; `PIECES_AHEAD` pieces are requested at once."""
        offsets = deque(range(0, size_bytes, PIECE_BYTES))
        ahead: deque[asyncio.Task[c.Piece]] = deque()
        try:
            while offsets or ahead:
                while offsets and len(ahead) < PIECES_AHEAD:
                    ahead.append(asyncio.create_task(self._read(policy_version, offsets.popleft())))
                yield (await ahead.popleft()).data
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def _read(self, policy_version: int, offset: int) -> c.Piece:
        order = c.ReadWeights(
            rank=self._rank, policy_version=policy_version, offset=offset, num_bytes=PIECE_BYTES
        )
        piece: c.Piece = await self._ask(order)
        return piece


def _put(target: memoryview, at: int, data: bytes) -> None:
    target[at : at + len(data)] = data


def _write_plan(path: Path, plan: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(plan)
