"""A trainer rank's segment as other nodes fetch it: all of it, or the slices of one part, packed."""

import bisect
import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from yatt.adapters.node_local.host_segment import WEIGHTS, SegmentReader, segment_path, weight_plan_path
from yatt.errors import WorkerFailed
from yatt.records.weights import WeightPlan
from yatt.weights.slices import ByteRows, sliced_plan


def plan_digest(plan: bytes) -> bytes:
    """A digest by which two nodes tell that they have the same plan."""
    return hashlib.blake2b(plan, digest_size=16).digest()


class GivenSegment:
    """One rank's segment, or one part's slices of it.

    Args:
        part: number of a node in an engine that spans several; None: all of the segment.

    Raises:
        WorkerFailed: there is no host copy, or its plan knows no such part.
    """

    def __init__(self, stem: Path, part: int | None) -> None:
        try:
            self.plan = weight_plan_path(stem).read_bytes()
        except OSError as error:
            raise WorkerFailed(f"trainer {stem.name} has no host copy here: {error.strerror}") from error
        self.reader = SegmentReader(segment_path(stem, WEIGHTS))
        self.size_bytes, self.unknown_bytes = len(self.reader.data), 0
        self._runs: tuple[ByteRows, ...] | None = None
        if part is not None:
            self._slice(stem, part)
        self.digest = plan_digest(self.plan)

    def _slice(self, stem: Path, part: int) -> None:
        try:
            slices = sliced_plan(msgspec.msgpack.decode(self.plan, type=WeightPlan), part)
        except (msgspec.DecodeError, IndexError) as error:
            raise WorkerFailed(f"the plan of trainer {stem.name} has no part {part}: {error}") from error
        self._runs, self.size_bytes = slices.runs, slices.size_bytes
        self.unknown_bytes = slices.unknown_bytes
        self.plan = msgspec.msgpack.encode(slices.plan)

    def block(self, begin: int, end: int) -> memoryview:
        """Returns bytes [begin, end): a view of the segment, or packed slices in new memory."""
        if self._runs is None:
            return self.reader.data[begin:end]
        import numpy as np

        packed = np.zeros(end - begin, np.uint8)  # zeros between slices, so that blocks are the same anew
        for run in self._runs[bisect.bisect_right(self._ends, begin) :]:
            if run.at >= end:
                break
            low, high = max(begin, run.at), min(end, run.end)
            self._copy(run, low - run.at, high - run.at, packed[low - begin : high - begin])
        return packed.data

    @cached_property
    def _ends(self) -> list[int]:
        return [run.end for run in self._runs or ()]

    def _copy(self, run: ByteRows, low: int, high: int, target: Any) -> None:
        """Copies bytes [low, high) of a run: the end of a row, whole rows, the beginning of a row."""
        import numpy as np

        shape, strides = (run.num_rows, run.row_bytes), (run.stride, 1)
        rows = np.ndarray(shape, np.uint8, self.reader.data, offset=run.begin, strides=strides)
        done = 0
        while low < high:
            row, column = divmod(low, run.row_bytes)
            if column or high - low < run.row_bytes:
                size = min(run.row_bytes - column, high - low)
                target[done : done + size] = rows[row, column : column + size]
            else:
                count = (high - low) // run.row_bytes
                size = count * run.row_bytes
                target[done : done + size].reshape(count, run.row_bytes)[:] = rows[row : row + count]
            low, done = low + size, done + size
