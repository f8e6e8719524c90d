"""What a node offers of a trainer rank's weights: whole blocks, or only what changed since a former version.

The node that gives weights keeps a copy of what it gave last, and compares each block with it once per
version. The copy is brought up to date block by block while the present version is sent. If not every block
was, the next version is sent whole.
"""

import contextlib
import threading
from dataclasses import dataclass

from yatt.adapters.net import bulk
from yatt.adapters.net.changes import apply_change, change_between
from yatt.adapters.node_local.host_segment import Stamp
from yatt.control.gpus.weights.fill import Fill
from yatt.control.gpus.weights.given_segment import GivenSegment
from yatt.errors import WorkerFailed

_LOCKS = 16
"""Locks of one copy; blocks with different locks are compared at the same time."""


class FormerWeights:
    """The copy of one rank's weights. It is allocated when the first block is given."""

    def __init__(self, source: GivenSegment) -> None:
        self._source, self._is_refused = source, False
        self._data: memoryview | None = None
        self._changes: dict[int, bytes | None] = {}
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._allocating = threading.Lock()
        self._stamp: Stamp | None = None
        self._former_version, self._is_torn = 0, False

    def begin(self, stamp: Stamp) -> int:
        """Begins to give the present version, unless it has begun; returns the version of the copy before.

        Returns:
            0: the copy was of none.
        """
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            if self._stamp != stamp:
                is_whole = len(self._changes) == -(-self._source.size_bytes // bulk.BLOCK_BYTES)
                is_known = self._stamp is not None and is_whole and not self._is_torn
                self._former_version = self._stamp.version if is_known and self._stamp is not None else 0
                self._stamp, self._changes, self._is_torn = stamp, {}, False
            return self._former_version

    def change(self, stamp: Stamp, begin: int, end: int) -> bytes | None:
        """Returns the change of a block since the former version, and brings the copy up to date.

        Returns:
            None: there is no former version, or the change is not worth it.

        Raises:
            WorkerFailed: another version has begun.
        """
        index = begin // bulk.BLOCK_BYTES
        copy = self._allocated()
        if copy is None:
            return None
        with self._locks[index % _LOCKS]:
            if self._stamp != stamp:
                raise WorkerFailed(f"version {stamp.version} is not given any more")
            if index not in self._changes:
                former, present = copy[begin:end], self._source.block(begin, end)
                change = (
                    change_between(former, present) if self._former_version and not self._is_torn else None
                )
                if change is None:
                    former[:] = present
                else:
                    apply_change(change, former)  # less than to copy the block
                if not self._source.reader.is_still(stamp):
                    self._is_torn = True
                    raise WorkerFailed(f"version {stamp.version} has changed")
                self._changes[index] = change
            return self._changes[index]

    def _allocated(self) -> memoryview | None:
        """Returns the copy; None if there is no memory for it, so that all is sent whole."""
        import numpy as np

        with self._allocating:
            if self._data is None and not self._is_refused:
                try:  # numpy does not clear it, which would stop all threads for half a second per GiB
                    self._data = np.empty(self._source.size_bytes, np.uint8).data
                except MemoryError:
                    self._is_refused = True
            return self._data


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWeights:
    """The weights of a trainer rank of this node, or a part's slices of them, at one version; see bulk.Offer.

    Args:
        former: the copy to compare with; None: no changes are given.
        sends_changes: the caller has the former version.
    """

    source: GivenSegment
    stamp: Stamp
    former: FormerWeights | None
    sends_changes: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.source.size_bytes

    def block(self, begin: int, end: int) -> memoryview | bytes:
        """Returns a block, or its change."""
        change = self.former.change(self.stamp, begin, end) if self.former is not None else None
        return change if change is not None and self.sends_changes else self.source.block(begin, end)

    def is_valid(self) -> bool:
        """Whether the segment still has this version."""
        return self.source.reader.is_still(self.stamp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOnWeights:
    """Weights that this node fetches, for the next node of the chain, which has `former_version`."""

    fill: Fill
    former_version: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the segment."""
        return self.fill.size_bytes

    def block(self, begin: int, end: int) -> memoryview | bytes:
        """Waits for a block; returns it, or its change."""
        block = self.fill.block(begin, end)
        change = self.fill.change_of(begin, self.former_version) if self.former_version else None
        return block if change is None else change

    def is_valid(self) -> bool:
        """Whether the segment is not used for another version yet."""
        return self.fill.is_valid()
