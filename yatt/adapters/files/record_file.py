"""Files of records that are appended one by one; a reader skips whatever is not whole.

A file begins with a line that names its format, then records follow: a prefix with key, rank, size and
checksum of the data, and a checksum of the prefix itself; then the data. A writer that is killed leaves a
torn record at the end. Damaged data costs one record, a damaged prefix this record and those behind it.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

from yatt.adapters.files.files import make_within

MOST_BYTES = 1 << 30
"""Longest data of a record that is written or read."""

_PREFIX = struct.Struct("<QQQQ")
_CHECKSUM = struct.Struct("<Q")
PREFIX_BYTES = _PREFIX.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """One record in a file: `key` and `rank` are the writer's, `begin` is the first byte of its data."""

    key: int
    rank: int
    begin: int
    size_bytes: int
    checksum: int


class RecordWriter:
    """Appends records to a file of this writer alone. Blocks: not for an event loop.

    A failed `append` can be repeated: the record is written again to the same place. If the file was removed
    meanwhile, a new one begins.

    Args:
        root: an existing folder above the file; it is never created.
        head: the format's line, and records that every file begins with.
    """

    def __init__(self, root: Path, path: Path, head: bytes) -> None:
        self._root, self._path, self._head = root, path, head
        self._descriptor = -1
        self._size = 0

    def append(self, key: int, rank: int, data: bytes) -> None:
        """Writes one record, durably.

        Raises:
            OSError: not written, or not known to be; it may be tried again.
            FolderGone, ConfigError: the folder of the file cannot be created.
        """
        try:
            if self._descriptor < 0:
                self._open()
            record = encoded_record(key, rank, data)
            self._write(record)
            os.fdatasync(self._descriptor)
        except OSError:
            self.close()  # a stale handle is opened again
            raise
        self._size += len(record)

    def close(self) -> None:
        """Closes the file, until the next `append`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def remove(self) -> None:
        """Closes and removes the file."""
        self.close()
        self._path.unlink(missing_ok=True)

    def _open(self) -> None:
        make_within(self._root, self._path.parent)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        if not self._size or os.fstat(self._descriptor).st_size < self._size:
            self._size = 0
            self._write(self._head)
            self._size = len(self._head)

    def _write(self, data: bytes) -> None:
        at = self._size
        while data:
            written = os.pwrite(self._descriptor, data, at)
            at, data = at + written, data[written:]


class RecordReader:
    """Reads a file that may be torn, damaged or of another kind. Blocks: not for an event loop.

    Args:
        num_bytes: length of the format's line, which is then in `line`.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a fifo must not hang it
        self._begin = num_bytes
        try:
            self._size = os.fstat(self._descriptor).st_size
            self.line = os.pread(self._descriptor, num_bytes, 0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RecordReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def places(self) -> Iterator[RecordPlace]:
        """Yields the records up to the first one that is not whole, by their prefixes alone."""
        at = self._begin
        while (place := decoded_prefix(os.pread(self._descriptor, PREFIX_BYTES, at), at)) is not None:
            at = place.begin + place.size_bytes
            if at > self._size:
                return
            yield place

    def data(self, place: RecordPlace) -> bytes | None:
        """Returns the data of a record, None if it is damaged. Memory is taken only for what the file has."""
        if place.size_bytes > min(MOST_BYTES, self._size - place.begin):
            return None
        data = os.pread(self._descriptor, place.size_bytes, place.begin)
        return data if xxhash.xxh3_64_intdigest(data) == place.checksum else None


def encoded_record(key: int, rank: int, data: bytes) -> bytes:
    """Returns one record.

    Raises:
        ValueError: its data is too long to be read again.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"a record of {len(data)} bytes is too long")
    prefix = _PREFIX.pack(key, rank, len(data), xxhash.xxh3_64_intdigest(data))
    return prefix + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prefix)) + data


def decoded_prefix(raw: bytes, at: int) -> RecordPlace | None:
    """Returns the record whose prefix was read at byte `at`, None if the prefix is not whole."""
    if len(raw) != PREFIX_BYTES:
        return None
    prefix, checksum = raw[: _PREFIX.size], raw[_PREFIX.size :]
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prefix)) != checksum:
        return None
    key, rank, size_bytes, digest = _PREFIX.unpack(prefix)
    return RecordPlace(key, rank, at + PREFIX_BYTES, size_bytes, digest)
