"""Uploads one save: the files of all ranks of this node, several at a time, in a pool of threads.

A rank's snapshot is read from the host copy, or from what was copied out of it.
"""

import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from yatt.adapters.files.files import Buffer
from yatt.adapters.node_local.host_segment import SegmentReader, Stamp, plan_path, segment_path
from yatt.checkpoint.commit.writing import Streams, write_file
from yatt.core.attempts.checkpoint_names import shard_path
from yatt.errors import WorkerFailed
from yatt.records.message import PlannedPiece, SavePlan, ShardFile

THREADS = 4
"""Files that are uploaded at once; each thread holds one block, and what the store's driver holds."""

BLOCK_BYTES = 1 << 20
"""A block is copied, then its checksum is computed, then it is written: it stays in a core's cache."""


class Throttle:
    """Limits the bytes per second of all threads together; 0: no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._next_s, self._lock = bytes_per_s, 0.0, threading.Lock()

    def wait(self, num_bytes: int) -> None:
        """Waits until so many bytes may be sent."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = time.monotonic()
            begin_s = max(now_s, self._next_s)
            self._next_s = begin_s + num_bytes / self._bytes_per_s
        time.sleep(begin_s - now_s)


def read_snapshot_plan(stem: Path) -> SavePlan:
    """Reads the plan beside a host copy.

    Raises:
        WorkerFailed: there is none.
    """
    try:
        return msgspec.msgpack.decode(plan_path(stem).read_bytes(), type=SavePlan)
    except (OSError, msgspec.DecodeError) as error:
        raise WorkerFailed(f"{plan_path(stem)} cannot be read as the plan of a save: {error}") from error


class RankSnapshot:
    """One rank's state at one version.

    Args:
        stem: path of the host copy.

    Raises:
        WorkerFailed: the host copy is missing, or of another version.
    """

    def __init__(self, stem: Path, stamp: Stamp) -> None:
        self.plan, self._stamp = read_snapshot_plan(stem), stamp
        areas = {piece.area for pieces in self.plan.files for piece in pieces}
        self._segments = {area: SegmentReader(segment_path(stem, area)) for area in areas}
        self._copied: dict[tuple[int, PlannedPiece], bytes] = {}
        self._done: set[int] = set()
        self._lock = threading.Lock()
        self._check(areas)

    def blocks(self, file: int, piece: PlannedPiece) -> Iterator[Buffer]:
        """Yields a piece of the plan's file with this index, in blocks of `BLOCK_BYTES`. A block is valid
        until the next one is requested.

        Raises:
            WorkerFailed: the host copy was changed before the piece was copied.
        """
        room = memoryview(bytearray(min(BLOCK_BYTES, piece.size_bytes)))
        for begin in range(0, piece.size_bytes, BLOCK_BYTES):
            yield self._block(file, piece, begin, room[: piece.size_bytes - begin])

    def _block(self, file: int, piece: PlannedPiece, begin: int, room: memoryview) -> Buffer:
        end = begin + len(room)
        kept = self._copied.get((file, piece))
        if kept is None:
            room[:] = self._now(piece)[begin:end]
            if self._segments[piece.area].is_still(self._stamp):
                return room
            kept = self._copied.get((file, piece))  # changed after `detach` had copied it out
        if kept is None:
            self._segments[piece.area].check(self._stamp)
            raise WorkerFailed("the host copy was changed while it was uploaded")
        return memoryview(kept)[begin:end]

    def done(self, file: int) -> None:
        """Notes that a file is uploaded, so that its pieces are not needed any more."""
        with self._lock:
            self._done.add(file)
            for piece in self.plan.files[file]:
                self._copied.pop((file, piece), None)

    def detach(self, areas: Container[str], tick: Callable[[], None]) -> int:
        """Copies the pieces of these areas in all files that are not done, so that the areas may change.
        Returns the number of bytes copied by this call.

        Args:
            tick: called after each piece.

        Raises:
            WorkerFailed: the host copy was changed before.
        """
        copied = 0
        for index, pieces in enumerate(self.plan.files):
            for piece in pieces:
                with self._lock:
                    is_needed = index not in self._done and (index, piece) not in self._copied
                if is_needed and piece.area in areas:
                    copied += self._keep(index, piece)
                    tick()
        return copied

    def _keep(self, file: int, piece: PlannedPiece) -> int:
        kept = bytes(self._now(piece))
        self._check({piece.area})
        with self._lock:
            if file not in self._done:
                self._copied[file, piece] = kept
        return len(kept)

    def _now(self, piece: PlannedPiece) -> memoryview:
        return self._segments[piece.area].data[piece.at : piece.at + piece.size_bytes]

    def _check(self, areas: Sequence[str] | set[str]) -> None:
        for area in areas:
            self._segments[area].check(self._stamp)

    def close(self) -> None:
        """Unmaps the host copy and drops what was copied."""
        self._copied.clear()
        for segment in self._segments.values():
            segment.close()


class UploadJob:
    """The upload of one iteration's snapshots.

    Args:
        url: prefix of the files.
        tick: called after each block, in any thread.

    Raises:
        WorkerFailed: a host copy is missing, or of another version.
    """

    def __init__(
        self,
        store: Streams,
        url: str,
        stems: Sequence[Path],
        stamp: Stamp,
        *,
        throttle: Throttle,
        tick: Callable[[], None],
    ) -> None:
        self._store, self._url, self._throttle, self._tick = store, url, throttle, tick
        self._is_cancelled = False
        self._snapshots = [RankSnapshot(stem, stamp) for stem in stems]

    def run(self) -> tuple[ShardFile, ...]:
        """Uploads everything; returns the files, by rank and number.

        Raises:
            WorkerFailed: a host copy was changed meanwhile, or the job was cancelled.
            StoreUnreachable | OSError: the store does not take a file.
        """
        with ThreadPoolExecutor(THREADS, thread_name_prefix="upload") as pool:
            uploads = [
                pool.submit(self._upload, snapshot, index)
                for snapshot in self._snapshots
                for index in range(len(snapshot.plan.files))
            ]
            self._wait(uploads)
        return tuple(upload.result() for upload in uploads)

    def detach(self, areas: Container[str]) -> int:
        """See `RankSnapshot.detach`; for all ranks."""
        return sum(snapshot.detach(areas, self._tick) for snapshot in self._snapshots)

    def cancel(self) -> None:
        """Ends the upload at the next block."""
        self._is_cancelled = True

    def close(self) -> None:
        """Frees the snapshots. `run` and `detach` must have ended."""
        for snapshot in self._snapshots:
            snapshot.close()

    def _wait(self, uploads: Sequence["Future[ShardFile]"]) -> None:
        """Waits for all files; after a failure the others are given up."""
        done, rest = wait(uploads, return_when=FIRST_EXCEPTION)
        failed = next((upload.exception() for upload in done if upload.exception() is not None), None)
        if failed is None:
            return
        self.cancel()
        for upload in rest:
            upload.cancel()
        raise failed

    def _upload(self, snapshot: RankSnapshot, index: int) -> ShardFile:
        path = shard_path(self._url, snapshot.plan.rank, index)
        pieces = snapshot.plan.files[index]
        written = write_file(
            self._store, path, pieces, lambda: (self._blocks(snapshot, index, piece) for piece in pieces)
        )
        snapshot.done(index)
        return written

    def _blocks(self, snapshot: RankSnapshot, index: int, piece: PlannedPiece) -> Iterator[Buffer]:
        for block in snapshot.blocks(index, piece):
            self._throttle.wait(len(block))
            if self._is_cancelled:
                raise WorkerFailed("the upload was cancelled")
            yield block
            self._tick()
