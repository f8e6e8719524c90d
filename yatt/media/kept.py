"""The node's files of prepared media: made once, kept in memory, evicted by `yatt.core.samples.kept_media`.

Safe for threads. Who wants a file claims it: if another thread makes it, the claim waits for that one.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from yatt.adapters.files.full_disk import is_full
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.adapters.node_local.media_file import HELD, MediaShape, is_held, media_head, shape_of_prepared
from yatt.core.samples.kept_media import MediaCache, NoRoom

_LOG = logging.getLogger(__name__)
NEW, AWAY = ".new", ".away"
"""Ends of the names of files that are being written, and that are being evicted."""


class KeptFiles:
    """The files in one folder, which no other process writes to.

    Args:
        folder: in a memory filesystem; made if missing.
        limit_bytes: most bytes of all files.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._most_bytes, self._cache = folder, limit_bytes, MediaCache(limit_bytes)
        self._changed = threading.Condition()
        self._claimed: set[str] = set()
        folder.mkdir(mode=0o700, exist_ok=True)
        self._adopt_files()

    @property
    def limit_bytes(self) -> int:
        """The limit now: lower than at first after the filesystem was full."""
        return self._cache.limit_bytes

    @contextlib.contextmanager
    def order(self, number: int) -> Iterator[None]:
        """Context manager: the files that this order claims stay until its end."""
        with self._changed:
            self._cache.begin_order(number)
        try:
            yield
        finally:
            with self._changed:
                self._cache.end_order(number)

    @contextlib.contextmanager
    def claimed_file(self, order: int, digest: str) -> Iterator[MediaShape | None]:
        """Context manager: the shape of a file that is kept; None: the caller is to make it (`keep_file`).

        Until the end of the context no other thread makes the same file.
        """
        with self._changed:
            while digest in self._claimed:
                self._changed.wait()
            self._claimed.add(digest)
        try:
            yield self._found(order, digest)
        finally:
            with self._changed:
                self._claimed.remove(digest)
                self._changed.notify_all()

    def keep_file(
        self, order: int, digest: str, grid: tuple[int, int, int], patches: NDArray[np.uint8]
    ) -> None:
        """Writes a file that was claimed; [rows, columns] uint8.

        Raises:
            NoRoom: other orders need too much of the room.
            MediaRefused: there is too little room for this order.
            OSError: it cannot be written.
        """
        shape = MediaShape(grid, patches.shape[1])
        while True:
            self._make_room(order, digest, shape.size_bytes)
            try:
                self._write(digest, media_head(digest, shape), patches)
            except OSError as error:
                self._not_written(digest, error)
            else:
                with self._changed:
                    self._cache.written_file(digest)
                return

    def _found(self, order: int, digest: str) -> MediaShape | None:
        with self._changed:
            if not self._cache.hold_file(order, digest):
                return None
            try:
                return shape_of_prepared(self._folder, digest)
            except (OSError, ValueError) as error:
                _LOG.warning("a prepared medium is made again: %s", error)
                self._cache.forget_file(digest)
                self._remove(digest)
                return None

    def _make_room(self, order: int, digest: str, size: int) -> None:
        away = list[str]()

        def stays(victim: str) -> bool:
            if self._take_away(victim):
                away.append(victim)
            return victim not in away

        with self._changed:
            try:
                self._cache.reserve_room(order, digest, size, stays)
            except NoRoom as refusal:
                for each in away:
                    self._rename(each + AWAY, each)
                if not refusal.is_final:
                    raise
                raise MediaRefused(self._room_fault(size)) from None
            for each in away:
                self._remove(each + AWAY)

    def _take_away(self, digest: str) -> bool:
        """Gives a file another name, under which no request finds it; not one that is held. It is looked at
        twice, because it may be held between the first look and its renaming."""
        if is_held(self._folder, digest):
            return False
        self._rename(digest, digest + AWAY)
        if not is_held(self._folder, digest + AWAY):
            return True
        self._rename(digest + AWAY, digest)
        return False

    def _rename(self, name: str, other: str) -> None:
        with contextlib.suppress(OSError):  # it has vanished
            (self._folder / name).rename(self._folder / other)

    def _room_fault(self, size: int) -> str:
        left = self._cache.limit_bytes
        if left == self._most_bytes:
            return (
                f"has no room beside the other pictures of its order: it needs {size} bytes, and all "
                f"together may have {left}; raise media.cache_bytes"
            )
        self._cache.limit_bytes = self._most_bytes  # the next order tries again
        return (
            f"has no room: it needs {size} bytes, and the memory filesystem of {self._folder} is full with "
            f"{left} bytes of prepared pictures; give it more room, or lower media.cache_bytes"
        )

    def _write(self, digest: str, head: bytes, patches: NDArray[np.uint8]) -> None:
        new = self._folder / (digest + NEW)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for part in (memoryview(head), patches.data.cast("B")):
                    done = 0
                    while done < len(part):
                        done += file.write(part[done:])
            new.rename(self._folder / digest)
        except BaseException:
            self._remove(digest + NEW)
            raise

    def _not_written(self, digest: str, error: OSError) -> None:
        """Gives up the room of a file. On a full filesystem there is less room from now on.

        Raises:
            OSError: the error, if it is another one.
        """
        with self._changed:
            self._cache.drop_room(digest)
            if not is_full(error):
                raise error
            self._cache.lower_limit()
            left = self._cache.limit_bytes
        _LOG.warning("%s is full (%s): prepared media may take %d bytes", self._folder, error.strerror, left)

    def _adopt_files(self) -> None:
        """Takes over files of an earlier process whose head and length agree, the newest as far as they have
        room; removes all others. Links that hold files stay until they are released."""
        found, left = {}, self._most_bytes
        for name in sorted(os.listdir(self._folder), key=self._changed_ns, reverse=True):
            with contextlib.suppress(OSError, ValueError):
                size = shape_of_prepared(self._folder, name).size_bytes
                if size <= left:
                    found[name], left = size, left - size
            if name not in found and not name.endswith(HELD):
                self._remove(name)
        for name, size in reversed(found.items()):  # the oldest first
            self._cache.adopt_file(name, size)

    def _changed_ns(self, name: str) -> int:
        return (self._folder / name).lstat().st_mtime_ns

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()
