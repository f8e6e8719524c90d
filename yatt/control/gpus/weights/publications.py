"""The newest weights that this node's engines can load: of its own trainer ranks, or of other nodes'.

A publication is an index of host copies (`yatt.engine.weights.published`). In `disaggregated` placement, and
where a node has not all parts of the model, the missing parts are fetched
(`yatt.control.gpus.weights.weight_segments`). While host copies change, an engine that loads the version
before is refused; it loads the next one.
"""

import asyncio
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import msgspec

from yatt import clock
from yatt.adapters.files.files import write_atomically
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.gpus.weights.uploads import host_stem
from yatt.control.gpus.weights.weight_segments import FetchedWeights, WeightPart
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.engine.weights.published import INDEX_NAME, PublicationIndex
from yatt.errors import WorkerFailed
from yatt.models.cuts import engine_split
from yatt.obs.story.events import EventLog
from yatt.records import cluster as c, message as m
from yatt.records.events.saves import WeightsFetched, WeightsNotFetched

A = TypeVar("A", bound=m.Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPublication:
    """Weights that engines can load, and the trainer's log-probs of the probe (see m.Published)."""

    policy_version: int
    folder: Path
    probe: tuple[bytes, ...]
    expected: tuple[bytes, ...]
    rounding: float = 0.0


class Publications:
    """This node's newest publication."""

    def __init__(self, node: Node, peers: Peers, events: EventLog, progress: Progress) -> None:
        self._node, self._peers, self._events, self._progress = node, peers, events, progress
        self._taking = asyncio.Lock()
        self._fetched: dict[int, FetchedWeights] = {}
        self._stable = asyncio.Event()
        if not (node.is_newcomer and node.config.trains):  # its engines wait for their first weights
            self._stable.set()
        self.newest: LocalPublication | None = None

    # ---- changes --------------------------------------------------------------------------------

    def change(self) -> None:
        """Notes that host copies are about to change: until `adopt`, nothing can be loaded."""
        self._stable.clear()

    def adopt(self, published: LocalPublication) -> None:
        """Makes this publication the newest."""
        self.newest = published
        self._stable.set()

    async def newer_than(self, known: LocalPublication | None) -> LocalPublication | None:
        """Waits while host copies change; returns the newest publication if it is another one."""
        await self._stable.wait()
        return self.newest if self.newest is not known else None

    # ---- taking ---------------------------------------------------------------------------------

    async def take(self, order: c.TakeWeights) -> m.Message:
        """Makes a published version the newest here. Can be repeated: one that is here is not fetched again.
        A version is published again if the last save of a run has failed; engines then load it once more.

        Raises:
            WorkerFailed: a source does not have it, or is lost.
        """
        async with self._taking:
            if self.newest is None or self.newest.policy_version != order.policy_version:
                try:
                    await self._take(order)
                except OSError as error:
                    raise WorkerFailed(
                        f"weights cannot be written to {self._node.weights_root}: {error.strerror}"
                    ) from error
            else:
                self.adopt(replace(self.newest))  # another one, for engines that the old one has refused
        return m.Done()

    async def _take(self, order: c.TakeWeights) -> None:
        node = self._node
        ranks = node.placement.weight_ranks(node.index, *self._parallel)
        remote = [rank for rank in ranks if node.placement.node_of(rank) != node.index]
        if remote:
            await self._fetch(remote, order.policy_version)
        stems = [self._source(rank).stem if rank in remote else host_stem(node, rank) for rank in ranks]
        folder = node.weights_folder(order.policy_version)
        index = PublicationIndex(
            policy_version=order.policy_version,
            attempt=node.attempt,
            stems=tuple(map(str, stems)),
            sums=order.sums,
            part=self._part,
            part_sums=_sums_of(order.part_sums, self._part),
        )
        await call_in_thread(partial(_write_index, folder, index))
        old = self.newest
        self.adopt(
            LocalPublication(
                policy_version=order.policy_version,
                folder=folder,
                probe=order.probe,
                expected=order.probe_logprobs,
                rounding=order.rounding,
            )
        )
        if old is not None:
            await call_in_thread(partial(shutil.rmtree, old.folder, ignore_errors=True))

    async def _fetch(self, ranks: list[int], policy_version: int) -> None:
        began_s = clock.monotonic_s()
        self.change()
        fetches = [asyncio.ensure_future(self._source(rank).fetch(policy_version)) for rank in ranks]
        try:
            fetched = await asyncio.gather(*fetches)
        finally:
            for fetch in fetches:  # of the others, if one has failed
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)
        self._events.emit(
            WeightsFetched(
                policy_version=policy_version,
                ranks=ranks,
                size_bytes=sum(fill.size_bytes for fill, _ in fetched),
                received_bytes=sum(fill.received_bytes for fill, _ in fetched),
                unknown_bytes=sum(self._source(rank).unknown_bytes for rank in ranks),
                sources=[source for _, source in fetched],
                seconds=round(clock.monotonic_s() - began_s, 6),
            )
        )

    def fetched(self, rank: int) -> FetchedWeights | None:
        """This node's copy of a rank's weights; None if it fetches none."""
        return self._fetched.get(rank)

    def _source(self, rank: int) -> FetchedWeights:
        if rank not in self._fetched:
            self._fetched[rank] = FetchedWeights(
                node=self._node,
                which=WeightPart(rank, self._part),
                ask=self._ask,
                before=partial(self._before, rank),
                failed=partial(self._failed, rank),
                progress=self._progress.done,
            )
        return self._fetched[rank]

    def _before(self, rank: int) -> int | None:
        """The next lower node that fetches the same of a rank's weights and is not lost."""
        chain = self._chains[rank, self._part or 0]
        before = [node for node in chain if node < self._node.index and node not in self._peers.lost]
        return before[-1] if before else None

    def _failed(self, rank: int, source: int, error: str) -> None:
        self._events.emit(WeightsNotFetched(rank=rank, source=source, error=error))

    @cached_property
    def _chains(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return self._node.placement.weight_chains(*self._parallel, in_parts=self._part is not None)

    @cached_property
    def _part(self) -> int | None:
        """Which slices this node needs; None: all of every tensor."""
        if engine_split(self._node.config) is None:
            return None
        return self._node.placement.weight_part(self._node.index)

    @property
    def _parallel(self) -> tuple[int, int]:
        parallel = self._node.config.trainer
        return parallel.whole_stage, parallel.pipeline_model_parallel_size

    async def _ask(self, source: int, body: m.Order[A]) -> A:
        answer = await self._peers.request(source, body, self._node.config.launch.phase_timeout_s)
        given = m.unless_failed(answer, f"node{source}")
        self._progress.done()
        return given


def sum_of_boxes(every: Iterable[dict[str, int]]) -> dict[str, int]:
    """Adds the boxes' parts of checksums, modulo 2^64 (`yatt.weights.checksum.box_sum`)."""
    total: dict[str, int] = {}
    for sums in every:
        for name, part in sums.items():
            total[name] = (total.get(name, 0) + part) % (1 << 64)
    return total


def sum_of_parts(every: Iterable[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """The same for the checksums of each part."""
    total: dict[str, tuple[int, ...]] = {}
    for sums in every:
        for name, parts in sums.items():
            before = total.get(name, (0,) * len(parts))
            total[name] = tuple((a + b) % (1 << 64) for a, b in zip(before, parts, strict=True))
    return total


def _sums_of(part_sums: dict[str, tuple[int, ...]], part: int | None) -> dict[str, int]:
    return {} if part is None else {name: sums[part] for name, sums in part_sums.items()}


def _write_index(folder: Path, index: PublicationIndex) -> None:
    folder.mkdir(exist_ok=True)
    write_atomically(folder / INDEX_NAME, msgspec.json.encode(index))
