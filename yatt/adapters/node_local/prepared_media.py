"""Files of prepared media: their format, and how engines and trainer ranks read them. No torch, no images.

A file is named after its digest and has a head of 64 bytes, then the patches as bytes, one row per patch:
[rows, columns] uint8, where columns = channels * patch * patch of a still picture. A video's file has pairs
of frames along its grid's time, and both frames in a row: twice the columns, which no still picture can have.
The media process writes a file under another name and renames it, so that whoever opens it sees all of it. It
is evicted by unlinking: who has mapped it keeps it, who comes late asks the media process again.
"""

import hashlib
import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from yatt.errors import ConfigError
from yatt.models.pictures.probe import noise_patches
from yatt.models.pictures.tokens import PatchTokens
from yatt.plain_files import read_json_object

INDEX = "index.json"
"""In a folder of the pictures of data files: the names of prepared files by the digests of pictures."""

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


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """One medium. `patches` is a read-only view of the file: [rows, columns] uint8."""

    grid: tuple[int, int, int]
    patches: NDArray[np.uint8]

    @property
    def is_still(self) -> bool:
        """Whether it is a picture: its columns are three squares. Those of two frames are twice a square."""
        area: int = self.patches.shape[1] // 3
        return math.isqrt(area) ** 2 == area


def prepared_names(folder: Path) -> dict[str, str]:
    """Returns the names of a folder's prepared files by the SHA-256 of the pictures' own files.

    Raises:
        ConfigError: the index is missing, or no object.
    """
    found = read_json_object(folder / INDEX)
    if found is None:
        raise ConfigError(f"{folder / INDEX} is missing; remove the folder, and start again.")
    return {key: str(name) for key, name in found.items()}


def with_frames(picture: PreparedMedia, frames: int) -> NDArray[np.uint8]:
    """Returns patches [rows, 3 * frames * side * side] uint8; each frame of a still picture is that
    picture."""
    rows, columns = picture.patches.shape
    if not picture.is_still:
        return picture.patches.copy()  # torch takes no view of what cannot be written
    still = picture.patches.reshape(rows, 3, 1, columns // 3)
    return np.repeat(still, frames, axis=2).reshape(rows, columns * frames)


def parts_of_prepared(prepared: PreparedMedia) -> Iterator[PreparedMedia]:
    """Yields the parts of a video, each with a time of 1; a picture is one."""
    if prepared.is_still:
        yield prepared
        return
    time, height, width = prepared.grid
    for part in range(time):
        rows = slice(part * height * width, (part + 1) * height * width)
        yield PreparedMedia((1, height, width), prepared.patches[rows])


def noise_picture(tokens: PatchTokens) -> PreparedMedia:
    """Returns the picture of the sync probe, which has no file."""
    grid, data = noise_patches(tokens)
    return PreparedMedia(grid, np.frombuffer(data, np.uint8).reshape(math.prod(grid), -1))


def media_digest(file_digest: str, preparation_digest: str) -> str:
    """Returns the name of a file that was prepared so: another preparation of it has another name."""
    return hashlib.sha256(f"{file_digest} {preparation_digest}".encode()).hexdigest()


def media_head(digest: str, shape: MediaShape) -> bytes:
    """Returns a file's head."""
    return _HEAD.pack(MAGIC, VERSION, shape.rows, shape.columns, *shape.grid, bytes.fromhex(digest))


def open_prepared(folder: Path, digest: str) -> PreparedMedia:
    """Maps one file.

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
    patches = np.frombuffer(view, np.uint8, offset=HEAD_BYTES).reshape(shape.rows, shape.columns)
    return PreparedMedia(shape.grid, patches)


def shape_of_prepared(folder: Path, digest: str) -> MediaShape:
    """Returns the shape of one file; errors as of `open_prepared`."""
    descriptor = _opened(folder, digest)
    try:
        return _checked_shape(descriptor, digest)
    finally:
        os.close(descriptor)


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
