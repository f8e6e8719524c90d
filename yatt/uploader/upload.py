"""Uploads one save: the files of all ranks of this node, several at a time, in a pool of threads."""

import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

from yatt.adapters.files.files import Buffer
from yatt.adapters.node_local.host_segment import Stamp
from yatt.checkpoint.commit.writing import Streams, write_file
from yatt.core.attempts.checkpoint_names import shard_path
from yatt.errors import WorkerFailed
from yatt.records.message import PlannedPiece, ShardFile
from yatt.uploader.snapshot import RankSnapshot

THREADS = 4
"""Files that are uploaded at once; each thread holds one block, and what the store's driver holds."""


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
