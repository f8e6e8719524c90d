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
import secrets
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
BROKEN_LOOKS = 25
"""A copy that is not whole, and that nobody makes, is in use by somebody who began before it was damaged."""

SETTLE_S = 600.0
"""So long after it was taken a copy may be used by somebody who holds no lock: a container's runtime."""

OTHER_FORMS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Weights that no loader reads where there are safetensors."""


class GivenUp(Exception):
    """Nobody waits for this copy any more."""


@dataclass(frozen=True, slots=True)
class SourceFile:
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
    _locks: dict[str, int] = field(default_factory=dict)

    @classmethod
    def within(cls, folder: Path, is_over: Callable[[], bool]) -> "LocalCopies":
        """In a folder of this user's own in `folder`, which others may be able to write to.

        Raises:
            OSError: there is none that is surely this user's.
        """
        if not folder.is_absolute():
            raise OSError(errno.EINVAL, f"'{folder}' is no absolute path")
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(errno.EPERM, "others can rename what is in it", str(folder))
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
        if not (parts := parts_of(source)):
            raise OSError(errno.ENOENT, "there is nothing in it", str(source))
        name, place, broken = _name_of(source, parts), leaf_of(source), 0
        while not self.is_over():
            descriptor = self._locked(name, fcntl.LOCK_SH)
            is_made = descriptor is None  # by another, who has the lock alone
            if descriptor is not None and self._is_whole(self.folder / name / place, parts):
                _unlock(self._locks.pop(name, None))
                self._locks[name] = descriptor
                self._touch(name)
                return self.folder / name / place
            _unlock(descriptor)
            descriptor = self._locked(name, fcntl.LOCK_EX)
            if descriptor is not None:
                try:
                    if not self._is_whole(self.folder / name / place, parts):
                        self._make(name, place, source, parts)
                finally:
                    _unlock(descriptor)
                continue
            broken = 0 if is_made else broken + 1
            if broken > BROKEN_LOOKS:
                raise OSError(errno.EBUSY, "its copy is damaged and in use", str(source))
            time.sleep(WAIT_S * random.uniform(0.5, 1.0))
        raise GivenUp

    def prune(self, keep_s: float) -> None:
        """Remove what nobody uses and was last used more than `keep_s` ago."""
        for name in self._oldest():
            if self._age_s(name) >= max(keep_s, SETTLE_S):
                self._remove(name)

    def release(self, *, keep: bool) -> None:
        """No copy is used by this process any more.

        Args:
            keep: False removes those that nobody else uses.
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
        """Names of all copies and parts of copies, the one first that was not used for the longest time."""
        found = {name.removesuffix(_LOCK).removesuffix(_PARTIAL) for name in os.listdir(self.folder)}
        return sorted(found, key=self._age_s, reverse=True)

    def _age_s(self, name: str) -> float:
        """Since its last use; of one that is not there, since its lock was made."""
        for path in (self.folder / name, self.folder / f"{name}{_PARTIAL}", self._lock_file(name)):
            with contextlib.suppress(OSError):
                return time.time() - path.stat().st_mtime
        return 0.0

    def _remove(self, name: str) -> None:
        """Remove one that nobody uses."""
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

    def _is_whole(self, root: Path, parts: list[SourceFile]) -> bool:
        """Whether it is there, with files of the right sizes: a crash may have left less."""
        with contextlib.suppress(OSError):
            return all((root / part.name).stat().st_size == part.size for part in parts)
        return False

    def _make(self, name: str, place: str, source: Path, parts: list[SourceFile]) -> None:
        """What another has begun is gone on with; its whole files have their names already."""
        target, partial = self.folder / name, self.folder / f"{name}{_PARTIAL}"
        if target.exists():
            shutil.rmtree(target)
        partial.mkdir(mode=0o700, exist_ok=True)
        for unfinished in partial.rglob(f"*{_UNFINISHED}"):
            unfinished.unlink(missing_ok=True)
        missing = [part for part in parts if not self._is_whole(partial / place, [part])]
        self._make_room(sum(part.size for part in missing), but=name)
        try:
            _Copying(source, partial / place, missing, self.is_over).run()
            if parts_of(source) != parts:
                raise OSError(errno.ESTALE, "changed while it was copied", str(source))
            os.rename(partial, target)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _make_room(self, size: int, but: str) -> None:
        old = (name for name in self._oldest() if name != but and self._age_s(name) >= SETTLE_S)
        while shutil.disk_usage(self.folder).free < size + SPARE_BYTES:
            if (name := next(old, None)) is None:
                raise OSError(errno.ENOSPC, f"no room for {size / 1e9:.1f} GB", str(self.folder))
            self._remove(name)


_PARTIAL, _LOCK, _UNFINISHED = ".partial", ".lock", ".unfinished"


class _Copying:
    """Some files of one source at a time, each in a daemon thread: a read that never returns holds nobody."""

    def __init__(
        self, source: Path, target: Path, parts: list[SourceFile], is_over: Callable[[], bool]
    ) -> None:
        self._source, self._target, self._is_over = source, target, is_over
        self._waiting: queue.SimpleQueue[SourceFile] = queue.SimpleQueue()
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
        """A file has its name once it is whole."""
        target.parent.mkdir(parents=True, exist_ok=True)
        buffer, copied = memoryview(bytearray(min(size, CHUNK_BYTES) or 1)), 0
        unfinished = target.with_name(f"{secrets.token_hex(8)}{_UNFINISHED}")
        try:
            with source.open("rb", buffering=0) as here, unfinished.open("xb") as there:
                if size:
                    os.posix_fallocate(there.fileno(), 0, size)  # a full disk says so now
                while count := here.readinto(buffer):
                    there.write(buffer[:count])
                    copied += count
                    if self._is_over() or self._errors:
                        raise GivenUp
                there.flush()
                os.fsync(there.fileno())
            if copied != size:
                raise OSError(errno.ESTALE, "changed while it was copied", str(source))
            unfinished.rename(target)
        finally:
            unfinished.unlink(missing_ok=True)


def leaf_of(source: Path) -> str:
    """What a copy is called: as its source, if that has a name of its own."""
    return source.name if source.name not in ("", "..") else "copy"


def parts_of(source: Path) -> list[SourceFile]:
    """The files of a folder that a loader may read, at any depth, by name; of a file itself, named "".

    Raises:
        OSError: it is not there, or cannot be read.
    """
    if not source.is_dir():
        return [_part(source, "")]
    return sorted(_parts_below(source, ""), key=lambda part: part.name)


def _parts_below(folder: Path, prefix: str) -> Iterator[SourceFile]:
    with os.scandir(folder) as scanned:
        entries = list(scanned)
    has_safetensors = any(entry.name.endswith(".safetensors") for entry in entries)
    for entry in entries:
        name = entry.name
        if name.startswith((".", "checkpoint-")) or name == "original":
            continue  # no loader reads the same weights in another form, nor a training run's states
        if entry.is_dir():
            yield from _parts_below(Path(entry.path), f"{prefix}{name}/")
        elif not (has_safetensors and name.endswith(OTHER_FORMS)):
            yield _part(Path(entry.path), f"{prefix}{name}")


def _part(path: Path, name: str) -> SourceFile:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "neither a file nor a folder", str(path))
    return SourceFile(name, found.st_size, found.st_mtime_ns)


def _name_of(source: Path, parts: list[SourceFile]) -> str:
    about = [str(source), *((part.name, part.size, part.changed_ns) for part in parts)]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
