"""Copies of files and folders on this node's own disk, shared by all processes of this user on it.

A copy is known by where its source is, and by the names, sizes and times of its files: a source that changes
has another copy. It appears whole, by a rename. Who uses it holds a lock on it that ends with the process, so
what nobody uses can be told from what somebody does, also after a crash.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import queue
import random
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from yatt.adapters.local_folder import is_ours

CHUNK_BYTES = 16 << 20
THREADS = 4
"""Files that are copied at a time: one stream seldom fills a parallel filesystem's line."""

SPARE_BYTES = 1 << 30
"""What a copy leaves free on the disk."""

WAIT_S = 0.2
UNUSED_PARTS = frozenset({"original"})
"""Folders of a published model that no loader reads: the same weights in another form."""


class GivenUp(Exception):
    """Nobody waits for this copy any more."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a source: its name in it, bytes, time of its last change in ns."""

    name: str
    size: int
    changed_ns: int


@dataclass(slots=True)
class LocalCopies:
    """This user's copies in one folder.

    Attributes:
        is_over: told once nobody waits any more.
    """

    folder: Path
    is_over: Callable[[], bool]
    _locks: list[int] = field(default_factory=list)

    @classmethod
    def within(cls, folder: Path, is_over: Callable[[], bool]) -> "LocalCopies":
        """In a folder of this user's own in `folder`, which others may be able to write to.

        Raises:
            OSError: there is none that is surely this user's.
        """
        own = folder / f"yatt-stage-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            own.mkdir(mode=0o700)
        if not is_ours(own) or stat.S_IMODE(own.lstat().st_mode) & 0o077:
            raise PermissionError(errno.EPERM, "not a folder of this user alone", str(own))
        return cls(own, is_over)

    def take(self, source: Path) -> Path:
        """The copy of a file or folder, which stays while this process lives. Made unless it is there; if
        another process makes it, that is waited for.

        Raises:
            OSError: it cannot be made, there is no room for it, or the source changes meanwhile.
            GivenUp: `is_over` before it was there.
        """
        parts = parts_of(source)
        name = _name_of(source, parts)
        while not self.is_over():
            descriptor = self._locked(name, fcntl.LOCK_SH)
            if descriptor is not None and self._is_whole(name, source, parts):
                self._locks.append(descriptor)
                os.utime(self.folder / name)
                return self.folder / name / source.name
            _unlock(descriptor)
            descriptor = self._locked(name, fcntl.LOCK_EX)
            if descriptor is not None:
                try:
                    if not self._is_whole(name, source, parts):
                        self._make(name, source, parts)
                finally:
                    _unlock(descriptor)
            else:
                time.sleep(WAIT_S * random.uniform(0.5, 1.0))
        raise GivenUp

    def prune(self, keep_s: float) -> None:
        """Remove what nobody uses and was last taken more than `keep_s` ago, and what was never completed."""
        for name in self._oldest():
            with contextlib.suppress(OSError):
                age_s = time.time() - (self.folder / name).stat().st_mtime
                if name.endswith(_PARTIAL) or age_s >= keep_s:
                    self._remove(name)

    def release(self) -> None:
        """No copy is used by this process any more."""
        while self._locks:
            _unlock(self._locks.pop())

    def _oldest(self) -> list[str]:
        """Names of all copies, the one first that was not taken for the longest time."""
        found = [entry for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)]
        return [entry.name for entry in sorted(found, key=lambda entry: entry.stat().st_mtime)]

    def _remove(self, name: str) -> None:
        """Remove one that nobody uses."""
        descriptor = self._locked(name, fcntl.LOCK_EX)
        if descriptor is not None:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            self._lock_file(name).unlink(missing_ok=True)
            _unlock(descriptor)

    def _lock_file(self, name: str) -> Path:
        return self.folder / f"{name.removesuffix(_PARTIAL)}.lock"

    def _locked(self, name: str, how: int) -> int | None:
        """A descriptor with the lock; None if another has it, or has removed it just now."""
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

    def _is_whole(self, name: str, source: Path, parts: list[Part]) -> bool:
        """Whether it is there, with files of the right sizes: a crash may have left less."""
        root = self.folder / name / source.name
        with contextlib.suppress(OSError):
            return all((root / part.name).stat().st_size == part.size for part in parts)
        return False

    def _make(self, name: str, source: Path, parts: list[Part]) -> None:
        target, partial = self.folder / name, self.folder / f"{name}{_PARTIAL}"
        for old in (target, partial):
            shutil.rmtree(old, ignore_errors=True)
        self._make_room(sum(part.size for part in parts), but=name)
        try:
            partial.mkdir(mode=0o700)
            _Copying(source, partial / source.name, parts, self.is_over).run()
            if parts_of(source) != parts:
                raise OSError(errno.ESTALE, "changed while it was copied", str(source))
            os.rename(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _make_room(self, size: int, but: str) -> None:
        names = iter([name for name in self._oldest() if name != but])
        while shutil.disk_usage(self.folder).free < size + SPARE_BYTES:
            if (name := next(names, None)) is None:
                raise OSError(errno.ENOSPC, f"no room for {size / 1e9:.1f} GB", str(self.folder))
            self._remove(name)


_PARTIAL = ".partial"


class _Copying:
    """Some files of one source at a time, each in a daemon thread: a read that never returns holds nobody."""

    def __init__(self, source: Path, target: Path, parts: list[Part], is_over: Callable[[], bool]) -> None:
        self._source, self._target, self._is_over = source, target, is_over
        self._waiting: queue.SimpleQueue[Part] = queue.SimpleQueue()
        for part in sorted(parts, key=lambda part: -part.size):
            self._waiting.put(part)
        self._errors: list[BaseException] = []

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._work, name="stage", daemon=True)
            for _ in range(min(THREADS, self._waiting.qsize()))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(WAIT_S)
                if self._is_over():
                    raise GivenUp
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._errors and not self._is_over():
                part = self._waiting.get_nowait()
                try:
                    self._copy(self._source / part.name, self._target / part.name, part.size)
                except Exception as error:  # noqa: BLE001 (told by who waits)
                    self._errors.append(error)

    def _copy(self, source: Path, target: Path, size: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        buffer, copied = memoryview(bytearray(min(size, CHUNK_BYTES) or 1)), 0
        with source.open("rb", buffering=0) as here, target.open("xb") as there:
            while count := here.readinto(buffer):
                there.write(buffer[:count])
                copied += count
                if self._is_over() or self._errors:
                    raise GivenUp
            there.flush()
            if copied != size:
                raise OSError(errno.ESTALE, "changed while it was copied", str(source))
            os.fsync(there.fileno())


def parts_of(source: Path) -> list[Part]:
    """The files of a folder that a loader may read, at any depth, by name; of a file itself, named "".

    Raises:
        OSError: it is not there, or cannot be read.
    """
    if not source.is_dir():
        return [_part(source, "")]
    return sorted(_parts_below(source, ""), key=lambda part: part.name)


def _parts_below(folder: Path, prefix: str) -> Iterator[Part]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name in UNUSED_PARTS:
                continue
            if entry.is_dir():
                yield from _parts_below(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                yield _part(Path(entry.path), f"{prefix}{entry.name}")


def _part(path: Path, name: str) -> Part:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "neither a file nor a folder", str(path))
    return Part(name, found.st_size, found.st_mtime_ns)


def _name_of(source: Path, parts: list[Part]) -> str:
    about = [str(source), *((part.name, part.size, part.changed_ns) for part in parts)]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
