"""Segments of weights between nodes: trainer nodes offer theirs, an engine node fills one of its own.

The engine node's segment is allocated once per attempt and is overwritten by each version. It is stamped like
the trainer's (`yatt.adapters.node_local.host_segment`), so engines read it in the same way: one version, or a
refusal. Bytes travel over `yatt.adapters.net.bulk`, in several streams; of a later version only what changed,
where that is less (`former_weights`).

Nodes that fetch the same of a rank's weights form a chain: the first one fetches from the trainer node, each
other one from the node before it, block by block as they arrive there. So a trainer node sends its weights
about once, however many nodes there are. If the node before fails, the rest comes from the trainer node. A
node of an engine that spans several fetches only the slices that its ranks have: chains are of nodes with the
same slices, which pass on packed blocks without knowing what is in them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.net import bulk
from yatt.adapters.node_local.host_segment import (
    WEIGHTS,
    SegmentWriter,
    Stamp,
    segment_path,
    weight_plan_path,
)
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.gpus.weights.fill import Fill
from yatt.control.gpus.weights.former_weights import FormerWeights, OwnWeights, PassedOnWeights
from yatt.control.gpus.weights.given_segment import GivenSegment, plan_digest
from yatt.control.gpus.weights.uploads import host_stem
from yatt.control.node import Node
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import cluster as c, message as m

TRIES_BEFORE, OWNER_TRIES = 2, 3
"""Tries with the node before, and tries in a row without a new block with the owner."""

PAUSE_S = 0.5
MEET_S, ANSWER_S = 5.0, 2.0
"""Longest time for a node to begin the version that the next node asks for, and to answer it."""

Ask = Callable[[int, m.Order[Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A trainer rank's weights, or of these the slices that node number `part` of an engine needs."""

    rank: int
    part: int | None = None

    @classmethod
    def of(cls, order: c.DescribeWeights | c.OfferWeights) -> "WeightPart":
        """Returns what a node asks for."""
        return cls(order.rank, order.part if order.part >= 0 else None)

    @property
    def number(self) -> int:
        """The part as orders have it."""
        return -1 if self.part is None else self.part


class GivenWeights:
    """What this node offers to others: the weights of its trainer ranks, and those that it has fetched."""

    def __init__(self, node: Node, fetched: Callable[[int], "FetchedWeights | None"]) -> None:
        self._node, self._fetched = node, fetched
        self._segments: dict[WeightPart, GivenSegment] = {}
        self._former: dict[WeightPart, FormerWeights] = {}
        self._server: bulk.BulkServer | None = None
        self._starting = asyncio.Lock()

    async def describe(self, order: c.DescribeWeights) -> m.Message:
        """Returns what a trainer rank's host copy contains, or a part's slices of it.

        Raises:
            WorkerFailed: the rank is of another node, or is not built, or has no such part.
        """
        found = await self._segment(WeightPart.of(order))
        return c.WeightsDescribed(
            plan=found.plan, size_bytes=found.size_bytes, unknown_bytes=found.unknown_bytes
        )

    async def offer(self, order: c.OfferWeights) -> m.Message:
        """Offers a rank's weights of one version.

        Raises:
            WorkerFailed: this node does not have them, or has another plan of them.
        """
        source: bulk.Offer
        if self._node.placement.node_of(order.rank) == self._node.index:
            source = await self._own(order)
        else:
            source = PassedOnWeights(fill=await self._fill(order), former_version=order.former_version)
        async with self._starting:
            if self._server is None:  # in a thread: names of hosts may be slow
                self._server = await call_in_thread(partial(bulk.BulkServer, self._node.host))
        ticket = self._server.offer(source)
        return c.WeightsOffered(host=ticket.host, port=ticket.port, name=ticket.name, key=ticket.key)

    async def _own(self, order: c.OfferWeights) -> OwnWeights:
        which, stamp = WeightPart.of(order), Stamp(self._node.attempt, order.policy_version)
        segment = await self._segment(which)
        segment.reader.check(stamp)
        _check_plan(order, segment.digest)
        former = None
        if self._node.config.placement.send_changes and self._node.config.model.dtype == "bfloat16":
            former = self._former.setdefault(which, FormerWeights(segment))
        is_known = former is not None and order.former_version == former.begin(stamp) > 0
        return OwnWeights(source=segment, stamp=stamp, former=former, sends_changes=is_known)

    async def _fill(self, order: c.OfferWeights) -> Fill:
        fetched = self._fetched(order.rank)
        fill = await fetched.filling(order.policy_version) if fetched is not None else None
        if fetched is None or fill is None or fetched.which != WeightPart.of(order):
            raise WorkerFailed(
                f"this node does not fetch version {order.policy_version} of trainer rank {order.rank}"
            )
        _check_plan(order, fetched.digest)
        return fill

    def close(self) -> None:
        """Offers nothing any more."""
        if self._server is not None:
            self._server.close()

    async def _segment(self, which: WeightPart) -> GivenSegment:
        if which not in self._segments:
            made = await call_in_thread(partial(GivenSegment, host_stem(self._node, which.rank), which.part))
            self._segments.setdefault(which, made)
        return self._segments[which]


def _check_plan(order: c.OfferWeights, digest: bytes) -> None:
    """Refuses a caller that would take the bytes for other slices."""
    if order.plan != digest:
        raise WorkerFailed(f"this node has another plan of the weights of trainer rank {order.rank}")


@dataclass(frozen=True, slots=True)
class _Segment:
    """What is fetched into; `digest` is of its plan."""

    writer: SegmentWriter
    digest: bytes
    unknown_bytes: int


@dataclass(slots=True, kw_only=True)
class FetchedWeights:
    """This node's copy of the weights of a trainer rank of another node.

    Args:
        which: the rank, and the part of it that this node needs.
        ask: sends a request to a node.
        before: returns the node before this one in the chain; None if there is none.
        failed: called with a node and its error, before the next try.
        progress: called after each block, in any thread.
    """

    node: Node
    which: WeightPart
    ask: Ask
    before: Callable[[], int | None]
    failed: Callable[[int, str], None]
    progress: Callable[[], None]
    _segment: _Segment | None = None
    _fill: Fill | None = None
    _version: int = 0
    _begun: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def stem(self) -> Path:
        """Path of the copy."""
        return self.node.weights_root / f"fetched-{self.which.rank:05d}"

    @property
    def digest(self) -> bytes:
        """Of the plan of what is fetched; empty before it is known."""
        return self._segment.digest if self._segment is not None else b""

    @property
    def unknown_bytes(self) -> int:
        """Bytes of tensors that are fetched whole because the engine's cut is not known."""
        return self._segment.unknown_bytes if self._segment is not None else 0

    async def filling(self, policy_version: int) -> Fill | None:
        """Waits until this version is being fetched, or has been; None if that does not begin in time."""

        def has_begun() -> bool:
            return self._fill is not None and self._fill.policy_version == policy_version

        try:
            async with asyncio.timeout(MEET_S), self._begun:
                await self._begun.wait_for(has_begun)
        except TimeoutError:
            return None
        return self._fill

    async def fetch(self, policy_version: int) -> tuple[Fill, int]:
        """Fetches a version; returns what came, and the node from which the last of it came.

        Raises:
            WorkerFailed, DeadlineExceeded: the trainer node does not have it, is lost, or cannot be reached.
            OSError: no room.
        """
        segment = (self._segment or await self._allocate()).writer
        if self._fill is not None:
            self._fill.end()
        segment.invalidate()
        former, self._version = self._version, 0
        async with self._begun:
            self._fill = fill = Fill(segment.data, policy_version, former, self.progress)
            self._begun.notify_all()
        try:
            source = await self._from_any(fill)
        except BaseException:
            fill.end()  # nodes behind this one need not wait
            raise
        if self._fill is not fill:
            raise WorkerFailed(
                f"version {policy_version} was overtaken by version {self._fill.policy_version}"
            )
        segment.complete(Stamp(self.node.attempt, policy_version))
        self._version = policy_version
        return fill, source

    async def _from_any(self, fill: Fill) -> int:
        """Fetches from the node before this one, then what is missing from the owner; returns the last.

        The node before is tried twice: if one before it stands still, all nodes behind notice it at the same
        time, and the first of them that turns to the owner feeds the others again.
        """
        for _ in range(TRIES_BEFORE):
            if (before := self.before()) is None:
                break
            try:
                await self._from(before, fill, MEET_S + ANSWER_S)
                return before
            except (WorkerFailed, DeadlineExceeded) as error:
                self.failed(before, str(error))
        owner, left = self.node.placement.node_of(self.which.rank), OWNER_TRIES
        while True:
            had = fill.num_blocks
            try:
                await self._from(owner, fill, None)
                return owner
            except WorkerFailed as error:
                left = left - 1 if fill.num_blocks == had else OWNER_TRIES
                if not left or not fill.is_valid():
                    raise
                self.failed(owner, str(error))
                await asyncio.sleep(PAUSE_S)

    async def _from(self, source: int, fill: Fill, limit_s: float | None) -> None:
        """Fetches the missing blocks from one node, which must answer within the limit.

        Raises:
            WorkerFailed, DeadlineExceeded: they did not all come.
        """
        order = c.OfferWeights(
            rank=self.which.rank,
            part=self.which.number,
            plan=self.digest,
            policy_version=fill.policy_version,
            former_version=fill.former_version,
        )
        try:
            async with asyncio.timeout(limit_s):
                offered: c.WeightsOffered = await self.ask(source, order)
        except TimeoutError as error:
            raise WorkerFailed(f"node{source} does not answer") from error
        ticket = bulk.Ticket(host=offered.host, port=offered.port, name=offered.name, key=offered.key)
        streams = [partial(bulk.receive_bytes, ticket, begin, end, fill) for begin, end in fill.missing()]
        try:
            await _all_threads(streams)
        except OSError as error:
            where = f"{ticket.host} port {ticket.port}"
            raise WorkerFailed(f"the transfer from node{source} ({where}) failed: {error}") from error

    async def _allocate(self) -> _Segment:
        owner = self.node.placement.node_of(self.which.rank)
        order = c.DescribeWeights(rank=self.which.rank, part=self.which.number)
        described: c.WeightsDescribed = await self.ask(owner, order)
        path, plan_path = segment_path(self.stem, WEIGHTS), weight_plan_path(self.stem)
        await call_in_thread(partial(plan_path.write_bytes, described.plan))
        writer = await call_in_thread(partial(SegmentWriter, path, described.size_bytes))
        self._segment = _Segment(writer, plan_digest(described.plan), described.unknown_bytes)
        return self._segment


async def _all_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Runs each call in its thread and waits for all of them; raises the first error."""
    outcomes = await asyncio.gather(*map(call_in_thread, calls), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
