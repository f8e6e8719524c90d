"""Prepared media as arrays, as engines and trainer ranks read them. No torch, no images."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from yatt.adapters.node_local.media_file import mapped_prepared
from yatt.errors import ConfigError
from yatt.models.pictures.probe import noise_patches
from yatt.models.pictures.tokens import FamilyTokens
from yatt.plain_files import read_json_object

INDEX = "index.json"
"""In a folder of the pictures of data files: the names of prepared files by the digests of pictures."""


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


def as_tiles(picture: PreparedMedia) -> NDArray[np.uint8]:
    """Returns the tiles [tiles, 3, height, width] uint8 of a picture that was cut into tiles."""
    tiles, height, width = picture.grid
    side = math.isqrt(picture.patches.shape[1] // 3)
    patches = picture.patches.reshape(tiles, height, width, 3, side, side).transpose(0, 3, 1, 4, 2, 5)
    return np.ascontiguousarray(patches.reshape(tiles, 3, height * side, width * side))


def parts_of_prepared(prepared: PreparedMedia) -> Iterator[PreparedMedia]:
    """Yields the parts of a video, each with a time of 1; a picture is one."""
    if prepared.is_still:
        yield prepared
        return
    time, height, width = prepared.grid
    for part in range(time):
        rows = slice(part * height * width, (part + 1) * height * width)
        yield PreparedMedia((1, height, width), prepared.patches[rows])


def noise_picture(tokens: FamilyTokens) -> PreparedMedia:
    """Returns the picture of the sync probe, which has no file."""
    grid, data = noise_patches(tokens)
    return PreparedMedia(grid, np.frombuffer(data, np.uint8).reshape(math.prod(grid), -1))


def open_prepared(folder: Path, digest: str) -> PreparedMedia:
    """Maps one file.

    Raises:
        FileNotFoundError: it is not prepared, or was evicted.
        ValueError: it is not the file that this digest names.
        OSError: it cannot be read.
    """
    shape, content = mapped_prepared(folder, digest)
    return PreparedMedia(shape.grid, np.frombuffer(content, np.uint8).reshape(shape.rows, shape.columns))
