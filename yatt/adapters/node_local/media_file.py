"""Files of prepared media: their format, and how they are opened. No torch, no images, no arrays.

A file is named after its digest and has a head of 64 bytes, then the patches as bytes, one row per patch:
[rows, columns] uint8, where columns = channels * patch * patch of a still picture. A video's file has pairs
of frames along its grid's time, and both frames in a row: twice the columns, which no still picture can have.
The media process writes a file under another name and renames it, so that whoever opens it sees all of it. It
is evicted by unlinking: who has mapped it keeps it, who comes late asks the media process again. A file with
a second link is *held*: an engine is about to open it, so it is not evicted. The controller makes the links
of a request; the engine removes them when it has opened the files, or else the controller at its end.
"""

import contextlib
import hashlib
import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HELD = ".held"
"""End of the names of links that hold files."""

_HEAD = struct.Struct("<8sIIIIII32s")
HEAD_BYTES = _HEAD.size
MAGIC, VERSION = b"yattmed\0", 1
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class MediaShape:
    """What a head says: patches in time, height and width, and bytes per patch."""

    grid: tuple[int, int, int]
    columns: int

    @property
    def rows(self) -> int:
        """Number of patches."""
        return math.prod(self.grid)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return HEAD_BYTES + self.rows * self.columns


def media_digest(file_digest: str, preparation_digest: str) -> str:
    """Returns the name of a file that was prepared so: another preparation of it has another name."""
    return hashlib.sha256(f"{file_digest} {preparation_digest}".encode()).hexdigest()


def media_head(digest: str, shape: MediaShape) -> bytes:
    """Returns a file's head."""
    return _HEAD.pack(MAGIC, VERSION, shape.rows, shape.columns, *shape.grid, bytes.fromhex(digest))


def mapped_prepared(folder: Path, digest: str) -> tuple[MediaShape, memoryview]:
    """Maps one file; returns its shape, and its bytes without the head, read-only.

    Raises:
        FileNotFoundError: it is not prepared, or was evicted.
        ValueError: it is not the file that this digest names.
        OSError: it cannot be read.
    """
    descriptor = _opened(folder, digest)
    try:
        shape = _checked_shape(descriptor, digest)
        view = mmap.mmap(descriptor, shape.size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return shape, memoryview(view)[HEAD_BYTES:]


def shape_of_prepared(folder: Path, digest: str) -> MediaShape:
    """Returns the shape of one file; errors as of `mapped_prepared`."""
    descriptor = _opened(folder, digest)
    try:
        return _checked_shape(descriptor, digest)
    finally:
        os.close(descriptor)


def hold_prepared(folder: Path, digests: Sequence[str], request_id: str) -> bool:
    """Holds all files of a request; returns False, and holds none, if one of them was evicted. A link that
    cannot be made is left out: an engine that comes too late for its file has the request sent again."""
    for index, digest in enumerate(digests):
        try:
            os.link(folder / digest, _link_of(folder, request_id, index))
        except FileNotFoundError:
            release_prepared(folder, index, request_id)
            return False
        except OSError:
            continue
    return True


def release_prepared(folder: Path, num_files: int, request_id: str) -> None:
    """Releases the files of a request; those that are not held are left out."""
    for index in range(num_files):
        with contextlib.suppress(OSError):
            _link_of(folder, request_id, index).unlink()


def is_held(folder: Path, digest: str) -> bool:
    """Whether a file is held by a request."""
    try:
        return (folder / digest).lstat().st_nlink > 1
    except OSError:
        return False


def _link_of(folder: Path, request_id: str, index: int) -> Path:
    return folder / f"{hashlib.sha256(request_id.encode()).hexdigest()}.{index}{HELD}"


def _opened(folder: Path, digest: str) -> int:
    if not _DIGEST.fullmatch(digest):
        raise ValueError("the name of a prepared medium is not a digest")
    return os.open(folder / digest, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _checked_shape(descriptor: int, digest: str) -> MediaShape:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"the prepared medium {digest} is no file")
    data = os.pread(descriptor, HEAD_BYTES, 0)
    if len(data) == HEAD_BYTES:
        magic, version, rows, columns, time, height, width, named = _HEAD.unpack(data)
        shape = MediaShape((time, height, width), columns)
        is_whole = 0 < shape.rows == rows and columns > 0 and found.st_size == shape.size_bytes
        if (magic, version, named.hex()) == (MAGIC, VERSION, digest) and is_whole:
            return shape
    raise ValueError(f"the prepared medium {digest} is damaged: head and length do not agree")
