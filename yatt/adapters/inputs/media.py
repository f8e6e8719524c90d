"""Pictures and videos that belong to prompts: their references in data rows, and reading their files.

A reference is made when a run is started (`yatt.launch.resolve.making_media`). It names a file below
`data.media_root`, or one of `data.media_store`, where pictures are whose bytes were in a data file or came
from the environment. Data never decides what else is opened: a reference that leaves the folder, also by a
link, is refused.
"""

import hashlib
import math
import re
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from yatt.adapters.files.files import write_atomically
from yatt.adapters.inputs.media_head import MediaRefused, head_of_bytes, refuse_pixels
from yatt.errors import ConfigError
from yatt.plain_files import open_regular
from yatt.printable import value_in_words
from yatt.records.message import MediaRef

MOST_BYTES = 256 << 20
"""Largest file."""


_DIGEST = re.compile(r"[0-9a-f]{64}")


class _Reference(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    path: str
    sha256: str
    width: int
    height: int
    num_frames: int = 0
    fps: float = 0.0


def media_of(value: Any, place: str, *, are_videos: bool = False) -> tuple[MediaRef, ...]:
    """Returns the references in a row's column.

    Args:
        place: file and row, for messages.
        are_videos: whether it is the column of videos.

    Raises:
        ConfigError: not a list of {path, sha256, width, height}, of videos also {num_frames, fps}; or a path
            that leaves the folder.
    """
    try:
        found = msgspec.convert([] if value is None else value, list[_Reference])
        if wrong := next((each for each in found if not _is_whole(each, are_videos)), None):
            raise ValueError(f"no path below data.media_root, digest and size: {wrong}")
    except ValueError as error:
        key = "data.video_key" if are_videos else "data.image_key"
        raise ConfigError(
            f"{place}: {key}: {value_in_words(value)} is not what was made of it at the start; a "
            "function of data.map may leave references out, and has to leave the others as they are."
        ) from error
    return tuple(
        MediaRef(each.path, each.sha256, each.width, each.height, each.num_frames, each.fps) for each in found
    )


def _is_whole(reference: _Reference, is_video: bool) -> bool:
    path = PurePosixPath(reference.path)
    is_below = not path.is_absolute() and ".." not in path.parts
    has_size = min(reference.width, reference.height) > 0
    is_timed = reference.num_frames > 0 and 0 < reference.fps < math.inf
    is_kind = is_timed if is_video else not reference.num_frames
    return is_below and bool(_DIGEST.fullmatch(reference.sha256)) and has_size and is_kind


def store_picture(content: bytes, store: str, most_pixels: int) -> MediaRef:
    """Writes a picture's bytes to a file named by their digest, unless it is there.

    Args:
        store: `data.media_store`.

    Raises:
        MediaRefused: it is no picture that is taken, or too large.
        OSError: it cannot be written.
    """
    if len(content) > MOST_BYTES:
        raise MediaRefused(f"has more than {MOST_BYTES >> 20} MiB")
    head = head_of_bytes(content)
    refuse_pixels(head, most_pixels)
    return MediaRef("", store_content(content, store), *head.shown_size)


def store_content(content: bytes, store: str) -> str:
    """Writes bytes to a file named by their digest, unless it is there; returns the digest.

    Args:
        store: `data.media_store`.

    Raises:
        OSError: it cannot be written.
    """
    digest = hashlib.sha256(content).hexdigest()
    target = Path(store, media_path("", digest))
    if not (target.is_file() and target.stat().st_size == len(content)):
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(target, content)
    return digest


def media_path(path: str, sha256: str) -> str:
    """Returns the path of a file in its folder: as named below `data.media_root`; if that is empty, by its
    digest in `data.media_store`."""
    return path or f"{sha256[:2]}/{sha256}"


def open_media(folder: str, path: str) -> BufferedReader:
    """Opens one file below a folder.

    Raises:
        ValueError: it is not below the folder.
        OSError: it cannot be opened, or is no regular file.
    """
    root = Path(folder).resolve()
    found = (root / path).resolve()
    if not found.is_relative_to(root):
        raise ValueError(f"{path} leads out of data.media_root")
    return open_regular(found)
