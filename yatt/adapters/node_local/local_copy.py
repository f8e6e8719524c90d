"""Copies of files, folders and archives on this node's local disk, shared by all processes of this user.

A copy is identified by the path of its source, and by the names, sizes and times of its files: a changed
source gets another copy. It appears complete, by a rename. A process that uses it holds a lock that ends with
the process, so unused copies can be detected, also after a crash.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from yatt.adapters.node_local.copied_files import CopiedFiles, GivenUp, copied_parts, media_parts
from yatt.adapters.node_local.local_folder import own_subfolder
from yatt.adapters.node_local.unpacked_archive import UnpackedArchive

SPARE_BYTES = 1 << 30
"""Bytes that a copy must leave free on the disk."""

WAIT_S = 0.2
BROKEN_LOOKS = 25
"""Number of checks after which an incomplete copy that no process is making counts as damaged and in use."""

SETTLE_S = 600.0
"""Time for which a copy may be used without a lock after it was taken, for example by a container runtime."""


class Copied(Protocol):
    """What a copy is made of: the files of a source, or the members of an archive."""

    @property
    def source(self) -> Path:
        """The file or folder of which this is a copy."""

    @property
    def leaf(self) -> str:
        """The name of the copy."""

    @property
    def identity(self) -> list[object]:
        """What tells this copy from others, as JSON takes it: a changed source has another one."""

    def is_whole(self, copy: Path) -> bool:
        """Whether nothing of the copy is missing; after a crash it may."""

    def num_missing_bytes(self, copy: Path) -> int:
        """Returns the bytes that `write` writes, as far as that is known."""

    def write(self, copy: Path, is_over: Callable[[], bool]) -> None:
        """Writes what the copy lacks.

        Raises:
            OSError: it cannot be written, or the source changes meanwhile.
            GivenUp: `is_over` returned True first.
        """


@dataclass(slots=True)
class LocalCopies:
    """This user's copies in one folder.

    Attributes:
        is_over: returns True once the caller does not wait any more.
    """

    folder: Path
    is_over: Callable[[], bool]
    _locks: dict[str, int] = field(default_factory=dict)

    @classmethod
    def within(cls, folder: Path, is_over: Callable[[], bool]) -> "LocalCopies":
        """Returns the copies in this user's own subfolder of `folder`, which may be writable by others.

        Raises:
            OSError: there is no subfolder that certainly belongs to this user.
        """
        return cls(own_subfolder(folder, f"yatt-stage-{os.getuid()}"), is_over)

    def take(self, source: Path) -> Path:
        """Returns the copy of a file or folder, which stays while this process lives. Makes it if it is
        missing; waits if another process is making it.

        Raises:
            OSError: it cannot be made, the disk is full, or the source changes meanwhile.
            GivenUp: `is_over` returned True first.
        """
        return self._taken(CopiedFiles.of(source, copied_parts))

    def take_media(self, folder: Path) -> Path:
        """Returns the copy of a folder of media, which lacks links; otherwise like `take`."""
        return self._taken(CopiedFiles.of(folder, media_parts))

    def unpack(self, archive: Path) -> Path:
        """Returns the folder with the members of a tar archive; otherwise like `take`."""
        return self._taken(UnpackedArchive.of(archive))

    def _taken(self, copied: Copied) -> Path:
        name, broken = _name_of(copied), 0
        while not self.is_over():
            descriptor = self._locked(name, fcntl.LOCK_SH)
            is_made = descriptor is None  # by another process, which holds the exclusive lock
            if descriptor is not None and copied.is_whole(self.folder / name / copied.leaf):
                _unlock(self._locks.pop(name, None))
                self._locks[name] = descriptor
                self._touch(name)
                return self.folder / name / copied.leaf
            _unlock(descriptor)
            descriptor = self._locked(name, fcntl.LOCK_EX)
            if descriptor is not None:
                try:
                    if not copied.is_whole(self.folder / name / copied.leaf):
                        self._make(name, copied)
                finally:
                    _unlock(descriptor)
                continue
            broken = 0 if is_made else broken + 1
            if broken > BROKEN_LOOKS:
                raise OSError(errno.EBUSY, "its copy is damaged and in use", str(copied.source))
            time.sleep(WAIT_S * random.uniform(0.5, 1.0))
        raise GivenUp

    def prune(self, keep_s: float) -> None:
        """Removes unused copies that were last used more than `keep_s` ago."""
        for name in self._oldest():
            if self._age_s(name) >= max(keep_s, SETTLE_S):
                self._remove(name)

    def release(self, *, keep: bool) -> None:
        """Releases all copies of this process.

        Args:
            keep: False also removes copies that no other process uses.
        """
        while self._locks:
            name, descriptor = self._locks.popitem()
            with contextlib.suppress(OSError):
                self._touch(name)
            _unlock(descriptor)
            if not keep:
                self._remove(name)

    def _touch(self, name: str) -> None:
        os.utime(self.folder / name)

    def _oldest(self) -> list[str]:
        """Returns the names of all complete and partial copies, least recently used first."""
        found = {name.removesuffix(_LOCK).removesuffix(_PARTIAL) for name in os.listdir(self.folder)}
        return sorted(found, key=self._age_s, reverse=True)

    def _age_s(self, name: str) -> float:
        """Returns the seconds since its last use; if it does not exist, since its lock was made."""
        for path in (self.folder / name, self.folder / f"{name}{_PARTIAL}", self._lock_file(name)):
            with contextlib.suppress(OSError):
                return time.time() - path.stat().st_mtime
        return 0.0

    def _remove(self, name: str) -> None:
        """Removes a copy if no process uses it."""
        with contextlib.suppress(OSError):
            descriptor = self._locked(name, fcntl.LOCK_EX)
            if descriptor is not None:
                for path in (self.folder / name, self.folder / f"{name}{_PARTIAL}"):
                    shutil.rmtree(path, ignore_errors=True)
                self._lock_file(name).unlink(missing_ok=True)
                _unlock(descriptor)

    def _lock_file(self, name: str) -> Path:
        return self.folder / f"{name}{_LOCK}"

    def _locked(self, name: str, how: int) -> int | None:
        """Returns a descriptor with the lock; None if another process holds it or has just removed it."""
        path = self._lock_file(name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    def _make(self, name: str, copied: Copied) -> None:
        """Makes a copy, or completes a partial one."""
        target, partial = self.folder / name, self.folder / f"{name}{_PARTIAL}"
        if target.exists():
            shutil.rmtree(target)
        partial.mkdir(mode=0o700, exist_ok=True)
        self._make_room(copied.num_missing_bytes(partial / copied.leaf), but=name)
        try:
            copied.write(partial / copied.leaf, self.is_over)
            os.rename(partial, target)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _make_room(self, size: int, but: str) -> None:
        old = (name for name in self._oldest() if name != but and self._age_s(name) >= SETTLE_S)
        while shutil.disk_usage(self.folder).free < size + SPARE_BYTES:
            if (name := next(old, None)) is None:
                raise OSError(errno.ENOSPC, f"not enough space for {size / 1e9:.1f} GB", str(self.folder))
            self._remove(name)


_PARTIAL, _LOCK = ".partial", ".lock"


def _name_of(copied: Copied) -> str:
    return hashlib.sha256(json.dumps(copied.identity).encode()).hexdigest()[:32]


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
