"""Reads a checkpoint's files as streams, in a few threads, and checks every byte. No torch.

A file is read in chunks, whatever pieces it has; so memory is bounded by the chunks of the threads.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from yatt.checkpoint.store.store import Store
from yatt.errors import CheckpointError
from yatt.records.message import ShardFile, TensorPiece
from yatt.records.shards import StateFile

CHUNK_BYTES = 16 << 20
THREADS = 4
"""Files that are read at once: one request at a time uses little of an object store's bandwidth."""

AnyFile = ShardFile | StateFile
Tick = Callable[[int], None]
"""Called with the number of bytes that were read; in any thread."""

Item = TypeVar("Item")
Given = TypeVar("Given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One damaged place of a checkpoint.

    Args:
        path: of the file, or of the manifest, in the store.
        key: of the tensor; empty if no tensor is concerned.
        begin: first byte of the piece in the file.
    """

    path: str
    key: str = ""
    begin: int = 0
    reason: str

    def __str__(self) -> str:
        of_piece = f" {self.key} at byte {self.begin}" if self.key else ""
        return f"{self.path}:{of_piece} {self.reason}"


class FileCheck:
    """Compares the bytes of a file, in order, with the checksums of its pieces and its own."""

    def __init__(self, file: AnyFile) -> None:
        self._file, self._at, self._next = file, 0, 0
        self._pieces = sorted(getattr(file, "tensors", ()), key=lambda piece: piece.begin)
        self._of_piece, self._of_file = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._found: list[Damage] = []

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes of the file."""
        self._of_file.update(chunk)
        begin, self._at, view = self._at, self._at + len(chunk), memoryview(chunk)
        while self._next < len(self._pieces):
            piece = self._pieces[self._next]
            end = piece.begin + piece.size_bytes
            self._of_piece.update(view[max(0, piece.begin - begin) : max(0, end - begin)])
            if end > self._at:
                return
            self._close(piece)

    def damages(self) -> list[Damage]:
        """Returns what is damaged, after the last byte."""
        cut_off = self._pieces[self._next :]
        found = [
            *self._found,
            *(self._damage(p, f"is cut off: the file ends at {self._at}") for p in cut_off),
        ]
        if not found and self._at != self._file.size_bytes:
            reason = f"has {self._at} bytes instead of {self._file.size_bytes}"
            found.append(Damage(path=self._file.path, reason=reason))
        elif not found and self._of_file.hexdigest() != self._file.checksum:
            where = "bytes outside of its tensors are" if self._pieces else "it is"
            found.append(Damage(path=self._file.path, reason=f"{where} not what was saved"))
        return found

    def _close(self, piece: TensorPiece) -> None:
        if self._of_piece.hexdigest() != piece.checksum:
            self._found.append(self._damage(piece, "is not what was saved"))
        self._of_piece, self._next = xxhash.xxh3_128(), self._next + 1

    def _damage(self, piece: TensorPiece, reason: str) -> Damage:
        return Damage(path=self._file.path, key=piece.key, begin=piece.begin, reason=reason)


def file_chunks(store: Store, file: AnyFile, tick: Tick) -> Iterator[bytes]:
    """Yields the bytes of a file in order, up to its end, which may come too early.

    Raises:
        CheckpointError: the file is missing.
        StoreUnreachable: it cannot be read.
    """
    for begin in range(0, file.size_bytes, CHUNK_BYTES):
        end = min(begin + CHUNK_BYTES, file.size_bytes)
        (data,) = store.read_ranges(file.path, [(begin, end)])
        yield data
        tick(len(data))
        if len(data) < end - begin:
            return


def checked_chunks(store: Store, file: AnyFile, tick: Tick) -> Iterator[bytes]:
    """Like `file_chunks`, but fails at the end if the file is not what was saved.

    Raises:
        CheckpointError: it is damaged.
    """
    check = FileCheck(file)
    for chunk in file_chunks(store, file, tick):
        check.feed(chunk)
        yield chunk
    if damages := check.damages():
        raise CheckpointError(str(damages[0]))


def in_threads(
    items: Iterable[Item], work: Callable[[Item, Tick], Given], tick: Tick, *, threads: int = THREADS
) -> list[Given]:
    """Returns `work(item, tick)` of every item, in order. The first failure, or Ctrl-C, stops all others at
    their next tick."""
    is_stopped = threading.Event()

    def step(num_bytes: int) -> None:
        if is_stopped.is_set():
            raise CancelledError
        tick(num_bytes)

    with ThreadPoolExecutor(max_workers=threads) as pool:
        futures = [pool.submit(work, item, step) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            is_stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]
