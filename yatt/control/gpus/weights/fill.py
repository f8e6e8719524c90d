"""A segment that another node's weights fill, and that other nodes read meanwhile."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from yatt.adapters.net import bulk
from yatt.adapters.net.changes import apply_change
from yatt.errors import WorkerFailed

STREAMS = 4
"""Connections at once for one segment."""


class Fill:
    """A segment that is being filled with one version, block by block, in any order; and then has it.

    Args:
        former_version: version of the blocks that are not there yet; 0: of none.
        progress: called after each block.
    """

    def __init__(
        self, data: memoryview, policy_version: int, former_version: int, progress: Callable[[], None]
    ) -> None:
        self.policy_version, self._data, self._progress = policy_version, data, progress
        self._former_version, self._is_spoiled = former_version, False
        self._has = bytearray(-(-len(data) // bulk.BLOCK_BYTES))
        self._changes: dict[int, bytes] = {}
        self.received_bytes = 0
        """Bytes of blocks and changes that came."""
        self._changed, self._is_over = threading.Condition(), False

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return len(self._data)

    @contextlib.contextmanager
    def place(self, begin: int, size: int) -> Iterator[memoryview]:
        """Gives the memory of one block, under the lock; see bulk.Place.

        Raises:
            WorkerFailed: the segment is used for another version meanwhile.
        """
        with self._changed:
            if self._is_over:
                raise WorkerFailed(f"version {self.policy_version} is not fetched any more")
            try:
                yield self._data[begin : begin + size]
            except BaseException:
                self._is_spoiled = True  # the block may be of no version now
                raise
            self._came(begin, size)
        self._progress()

    def change(self, begin: int, size: int, change: bytes) -> None:
        """Applies a change to one block, under the lock; see bulk.BlockTarget."""
        with self._changed:
            if self._is_over:
                raise WorkerFailed(f"version {self.policy_version} is not fetched any more")
            apply_change(change, self._data[begin : begin + size])
            self._changes[begin // bulk.BLOCK_BYTES] = change
            self._came(begin, len(change))
        self._progress()

    def _came(self, begin: int, num_bytes: int) -> None:
        self._has[begin // bulk.BLOCK_BYTES] = 1
        self.received_bytes += num_bytes
        self._changed.notify_all()

    @property
    def former_version(self) -> int:
        """Version of all blocks that are not there yet; 0: some may be of none."""
        return 0 if self._is_spoiled else self._former_version

    def change_of(self, begin: int, former_version: int) -> bytes | None:
        """Returns how a block that is there came, if it came as a change of that version."""
        return (
            self._changes.get(begin // bulk.BLOCK_BYTES) if former_version == self._former_version else None
        )

    def block(self, begin: int, end: int) -> memoryview:
        """Waits for a block and returns it; see bulk.Offer."""
        index = begin // bulk.BLOCK_BYTES
        with self._changed:
            if not self._changed.wait_for(lambda: self._has[index] or self._is_over, bulk.STALL_S):
                raise WorkerFailed("the block did not come in time")
        return self._data[begin:end]

    def is_valid(self) -> bool:
        """Whether no other version has begun."""
        return not self._is_over

    def end(self) -> None:
        """Ends it, before the segment is used for another version."""
        with self._changed:
            self._is_over = True
            self._changes = {}  # old offers still hold this object
            self._changed.notify_all()

    @property
    def num_blocks(self) -> int:
        """Number of blocks that are there."""
        return sum(self._has)

    def missing(self) -> list[tuple[int, int]]:
        """Returns ranges of blocks that are not there yet, cut into about `STREAMS` parts."""
        blocks = [index for index, has in enumerate(self._has) if not has]
        size = max(1, -(-len(blocks) // STREAMS))
        ranges: list[tuple[int, int]] = []
        for index in blocks:
            begin, end = index * bulk.BLOCK_BYTES, min((index + 1) * bulk.BLOCK_BYTES, len(self._data))
            if ranges and ranges[-1][1] == begin and begin - ranges[-1][0] < size * bulk.BLOCK_BYTES:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
        return ranges
