"""Files that belong to prompts: their references in data rows, and reading them.

A reference names a file below `data.media_root`. Data never decides what else is opened: a reference that
leaves the folder, also by a link, is refused.
"""

import hashlib
from pathlib import Path, PurePosixPath
from typing import Any

from yatt.errors import ConfigError
from yatt.records.message import MediaRef

MOST_BYTES = 256 << 20
"""Largest file."""


def media_of(value: Any, place: str) -> tuple[MediaRef, ...]:
    """Returns the references in a row's column.

    Args:
        place: file and row, for messages.

    Raises:
        ConfigError: not a path, {path, sha256} or a list of these; or a path that leaves the folder.
    """
    entries = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_ref(entry, place) for entry in entries)


def _ref(entry: Any, place: str) -> MediaRef:
    path, digest = (entry.get("path"), entry.get("sha256") or "") if isinstance(entry, dict) else (entry, "")
    if not isinstance(path, str) or not path or not isinstance(digest, str):
        raise ConfigError(f"{place}: data.media_key: {entry!r} is neither a path nor {{path, sha256}}.")
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ConfigError(f"{place}: data.media_key: {path!r} is not a path below data.media_root.")
    return MediaRef(path, digest)


def read_media(root: str, ref: MediaRef) -> bytes:
    """Reads one file.

    Raises:
        ValueError: it is not below `root`, too large, or not the file that the data names.
        OSError: it cannot be read.
    """
    folder = Path(root).resolve()
    path = (folder / ref.path).resolve()
    if not path.is_relative_to(folder):
        raise ValueError(f"{ref.path} leads out of data.media_root")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{ref.path} has more than {MOST_BYTES} bytes")
    if ref.sha256 and hashlib.sha256(data).hexdigest() != ref.sha256.lower():
        raise ValueError(f"{ref.path} is not the file that the data names: its SHA-256 differs")
    return data
