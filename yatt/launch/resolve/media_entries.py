"""Entries of a data row's columns of pictures and videos: their forms, and the files that they name."""

import base64
import binascii
import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import Any

from yatt.adapters.files.patience import is_passing
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.errors import ConfigError, StoreUnreachable
from yatt.media.fetch import MediaSource, MediaSources
from yatt.printable import printable, value_in_words
from yatt.records.media import SHOWN_CHARACTERS, MediaItem

MOST_PATH = 4096
_INLINE = "data:image/"


class RowFault(Exception):
    """A row whose pictures or videos cannot be used.

    Args:
        place: file, row and picture.
        name: of the picture's file.
        says: goes on with the sentence; its first words are the kind of fault.
    """

    def __init__(self, place: str, says: str, name: str = "") -> None:
        super().__init__(f"{place}: {printable(name[:SHOWN_CHARACTERS])}{name and ' '}{says}")
        self.kind = re.sub(r"\d+", "", " ".join(says.split()[:4]))


def entry_parts(entry: Any, place: str, key: str = "image") -> tuple[bytes | None, str, str]:
    """Returns an entry's bytes, else its path and the digest that it names.

    Args:
        key: of an object, beside `bytes` and `path`.

    Raises:
        RowFault: it has neither.
    """
    if isinstance(entry, dict):
        inner = entry.get("bytes")
        inner = entry.get(key) if inner is None else inner
        if inner is None:
            path, digest = entry.get("path"), entry.get("sha256") or ""
            if isinstance(path, str) and path and isinstance(digest, str):
                return None, path, digest
            inner = entry  # refused below
    else:
        inner = entry
    if isinstance(inner, bytes | bytearray):
        return bytes(inner), "", ""
    if isinstance(inner, str) and inner.startswith(_INLINE):
        return _decoded(inner, place), "", ""
    if isinstance(inner, str) and inner:
        return None, inner.removeprefix("file://"), ""
    says = "is neither a path nor bytes nor an object with one of them"
    raise RowFault(place, says, value_in_words(inner))


def _decoded(text: str, place: str) -> bytes:
    _, comma, content = text.partition(";base64,")
    try:
        if not comma:
            raise ValueError("no base64")
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowFault(place, "cannot be read as data:image/...;base64,...") from error


@contextlib.contextmanager
def named_source(path: str, root: str, sources: MediaSources) -> Iterator[tuple[str, MediaSource]]:
    """Context manager: a file that a row names, and its path below `data.media_root`.

    Raises:
        MediaRefused: it cannot be used.
        ConfigError: the store cannot be read.
        OSError: a transient error.
    """
    name = _below_root(path, root)
    try:
        with sources.opened_source(MediaItem(name)) as source:
            yield name, source
    except (FileNotFoundError, NotADirectoryError):
        raise MediaRefused("does not exist below data.media_root") from None
    except OSError as error:
        if is_passing(error):
            raise
        raise MediaRefused(f"cannot be read ({error.strerror})") from None
    except StoreUnreachable as error:
        away = OSError(errno.EHOSTUNREACH, str(error)) if error.is_passing else None
        raise ConfigError(f"{root} cannot be read: {error}", key="data.media_root") from away


def _below_root(path: str, root: str) -> str:
    """Returns the path of a file in `data.media_root`.

    Raises:
        MediaRefused: it cannot be a path of a file there.
    """
    if "://" in path:
        raise MediaRefused("is an address: rows name files only, or have their bytes; fetch it first")
    if len(path) > MOST_PATH:
        raise MediaRefused("is too long for a path; write pictures in base64 as data:image/png;base64,...")
    if os.path.isabs(path):  # the root, or a folder above it, may be a link
        path = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
    return os.path.normpath(path)
