"""Copies of files and folders on this node's local disk, shared by all processes of this user.

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

from yatt.adapters.local_folder import private

CHUNK_BYTES = 16 << 20
THREADS = 4
"""Number of files copied in parallel: one stream rarely uses the full bandwidth of a parallel filesystem."""

SPARE_BYTES = 1 << 30
"""Bytes that a copy must leave free on the disk."""

WAIT_S = 0.2
BROKEN_LOOKS = 25
"""Number of checks after which an incomplete copy that no process is making counts as damaged and in use."""

SETTLE_S = 600.0
"""Time for which a copy may be used without a lock after it was taken, for example by a container runtime."""

OTHER_FORMS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Weight formats that no loader reads if there are safetensors."""


class GivenUp(Exception):
    """The caller does not wait for this copy any more."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source: its relative name, its bytes, its modification time in ns."""

    name: str
    size: int
    changed_ns: int


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
        return cls(private(folder, f"yatt-stage-{os.getuid()}"), is_over)

    def take(self, source: Path) -> Path:
        """Returns the copy of a file or folder, which stays while this process lives. Makes it if it is
        missing; waits if another process is making it.

        Raises:
            OSError: it cannot be made, the disk is full, or the source changes meanwhile.
            GivenUp: `is_over` returned True first.
        """
        if not (parts := parts_of(source)):
            raise OSError(errno.ENOENT, "the folder is empty", str(source))
        name, place, broken = _name_of(source, parts), leaf_of(source), 0
        while not self.is_over():
            descriptor = self._locked(name, fcntl.LOCK_SH)
            is_made = descriptor is None  # by another process, which holds the exclusive lock
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

    def _is_whole(self, root: Path, parts: list[SourceFile]) -> bool:
        """Whether all files exist with the right sizes; after a crash they may not."""
        with contextlib.suppress(OSError):
            return all((root / part.name).stat().st_size == part.size for part in parts)
        return False

    def _make(self, name: str, place: str, source: Path, parts: list[SourceFile]) -> None:
        """Makes a copy, or completes a partial one, whose complete files have their final names already."""
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
                raise OSError(errno.ENOSPC, f"not enough space for {size / 1e9:.1f} GB", str(self.folder))
            self._remove(name)


_PARTIAL, _LOCK, _UNFINISHED = ".partial", ".lock", ".unfinished"


class _Copying:
    """Copies files of one source in parallel daemon threads: a read that never returns blocks nothing."""

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
                except Exception as error:  # noqa: BLE001 (raised again by `run`)
                    self._errors.append(error)

    def _copy(self, source: Path, target: Path, size: int) -> None:
        """Copies one file; it gets its final name once it is complete."""
        target.parent.mkdir(parents=True, exist_ok=True)
        buffer, copied = memoryview(bytearray(min(size, CHUNK_BYTES) or 1)), 0
        unfinished = target.with_name(f"{secrets.token_hex(8)}{_UNFINISHED}")
        try:
            with source.open("rb", buffering=0) as here, unfinished.open("xb") as there:
                if size:
                    os.posix_fallocate(there.fileno(), 0, size)  # fails now if the disk is full
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
    """Returns the name of a copy: that of its source, if it has one."""
    return source.name if source.name not in ("", "..") else "copy"


def parts_of(source: Path) -> list[SourceFile]:
    """Returns the files of a folder that a loader may read, at any depth, by name; of a file, itself as "".

    Raises:
        OSError: the source does not exist, or cannot be read.
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
            continue  # original weights in another format, and checkpoints of training runs, are not read
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
