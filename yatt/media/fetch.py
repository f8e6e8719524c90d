"""Where media come from: below `data.media_root`, a folder or an object store, or in `data.media_store`.

Data never decides what else is opened: a path that leaves the root, a URL and a link out are refused. Nothing
is fetched from the web: a row could name a service inside of the cluster.
"""

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import PurePosixPath
from typing import Any

from yatt.adapters.inputs.media import MOST_BYTES, media_path, open_media
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.checkpoint.store.store import Store, is_folder, open_store
from yatt.records.media import MediaItem

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An open file or object.

    Attributes:
        size_bytes: its length when it was opened.
        read_at: returns so many bytes from an offset on, fewer at the end.
    """

    size_bytes: int
    read_at: Callable[[int, int], bytes]

    def content(self, digest: str) -> bytes:
        """Returns everything.

        Raises:
            MediaRefused: it is not what this SHA-256 names.
        """
        data = self.read_at(0, self.size_bytes)
        if len(data) != self.size_bytes or hashlib.sha256(data).hexdigest() != digest:
            raise MediaRefused(
                "is not the file that it was when the data was made: its SHA-256 differs. Put it back, or "
                "remove the made file that data.train_files of the run's config.yaml names"
            )
        return data

    def content_digest(self) -> str:
        """Returns the SHA-256 of everything, in hex."""
        found = hashlib.sha256()
        for offset in range(0, self.size_bytes, PIECE_BYTES):
            found.update(self.read_at(offset, min(PIECE_BYTES, self.size_bytes - offset)))
        return found.hexdigest()


class MediaSources:
    """Opens the media of one run.

    Args:
        root: `data.media_root`, a folder or the URL of an object store; empty: no path is opened.
        stored: `data.media_store`.
        options: `media.storage_options`.
        limit_s: longest time of one call of the store.
        copies: folders on this node's disk by the folder that each is a copy of.

    Raises:
        ConfigError: `data.media_root` is a URL that cannot be opened.
    """

    def __init__(
        self,
        root: str,
        stored: str,
        options: Mapping[str, Any],
        limit_s: float,
        copies: Mapping[str, str] | None = None,
    ) -> None:
        self._root, self._stored, self._copies = root, stored, dict(copies or {})
        self._store: Store | None = None
        if root and not is_folder(root):
            self._store = open_store(root, dict(options), min(limit_s, 60.0))

    @contextlib.contextmanager
    def opened_source(self, item: MediaItem) -> Iterator[MediaSource]:
        """Context manager: the item's file.

        Raises:
            MediaRefused: the path is not below the root, or the file is too large.
            OSError, StoreUnreachable: it cannot be read.
        """
        _refuse_path(item.path)
        if self._store is not None and item.path:
            yield _object_source(self._store, item.path)
            return
        if item.path and not self._root:
            raise MediaRefused("is named by the data, but data.media_root is empty; write the folder")
        if not item.path and not item.sha256:
            raise MediaRefused("has neither a path nor a digest")
        root, path = self._root if item.path else self._stored, media_path(item.path, item.sha256)
        try:
            file = self._open_copy(root, path, item.sha256) or open_media(root, path)
        except ValueError as error:
            raise MediaRefused("leads out of data.media_root") from error
        except FileNotFoundError as error:
            raise (error if _has_entries(root) else _away(root)) from error
        with file:
            yield _file_source(file)

    def _open_copy(self, root: str, path: str, digest: str) -> BufferedReader | None:
        """Returns the file from the copy on this node's disk; None unless it has exactly these bytes: a copy
        is made once an attempt and lacks links, and a disk may fail."""
        if root not in self._copies or not digest:
            return None
        with contextlib.suppress(OSError, ValueError, MediaRefused), contextlib.ExitStack() as stack:
            file = stack.enter_context(open_media(self._copies[root], path))
            if _file_source(file).content_digest() == digest:
                stack.pop_all()
                return file
        return None


def _has_entries(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False


def _away(folder: str) -> OSError:
    """A filesystem that is not mounted now looks like an empty folder: another try may find the file."""
    return OSError(errno.ENOTCONN, f"{folder} is empty or missing; mount its filesystem")


def _refuse_path(path: str) -> None:
    if "://" in path or path.startswith("/") or "\0" in path or ".." in PurePosixPath(path).parts:
        raise MediaRefused("is not a path below data.media_root")


def _file_source(file: BufferedReader) -> MediaSource:
    size = os.fstat(file.fileno()).st_size
    _refuse_size(size)
    return MediaSource(size, partial(_read_file, file))


def _read_file(file: BufferedReader, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _object_source(store: Store, name: str) -> MediaSource:
    size = store.size(name)
    if size is None:
        raise FileNotFoundError(2, "there is no such object", name)
    _refuse_size(size)

    def read_at(offset: int, wanted: int) -> bytes:
        end = min(offset + wanted, size)
        return store.read_ranges(name, [(offset, end)])[0] if offset < end else b""

    return MediaSource(size, read_at)


def _refuse_size(size: int) -> None:
    if size > MOST_BYTES:
        raise MediaRefused(f"has {size} bytes, more than {MOST_BYTES}")
