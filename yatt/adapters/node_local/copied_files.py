"""What a local copy is made of: the files of a source that loaders read, copied by several threads."""

import contextlib
import errno
import os
import queue
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 16 << 20
THREADS = 4
"""Number of files copied in parallel: one stream rarely uses the full bandwidth of a parallel filesystem."""

WAIT_S = 0.2
OTHER_FORMS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Weight formats that no loader reads if there are safetensors."""

_UNFINISHED = ".unfinished"


class GivenUp(Exception):
    """The caller does not wait for this copy any more."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source: its relative name, its bytes, its modification time in ns."""

    name: str
    size: int
    changed_ns: int


@dataclass(slots=True)
class CopiedFiles:
    """The copy of a file or folder, which has each file of `parts`.

    Attributes:
        parts: what `list_parts` returned.
    """

    source: Path
    parts: list[SourceFile]

    list_parts: Callable[[Path], list[SourceFile]]

    @classmethod
    def of(cls, source: Path, list_parts: Callable[[Path], list[SourceFile]]) -> "CopiedFiles":
        """Looks at the source.

        Args:
            list_parts: `copied_parts` or `media_parts`.

        Raises:
            OSError: it does not exist, cannot be read, or has no files.
        """
        if not (parts := list_parts(source)):
            raise OSError(errno.ENOENT, "the folder is empty", str(source))
        return cls(source, parts, list_parts)

    @property
    def leaf(self) -> str:
        """The name of the copy."""
        return leaf_of(self.source)

    @property
    def identity(self) -> list[object]:
        """What tells this copy from others."""
        return [str(self.source), *((part.name, part.size, part.changed_ns) for part in self.parts)]

    def is_whole(self, copy: Path) -> bool:
        """Whether all files exist with the right sizes; after a crash they may not."""
        return not self._missing(copy)

    def num_missing_bytes(self, copy: Path) -> int:
        """Returns the bytes that `write` writes."""
        return sum(part.size for part in self._missing(copy))

    def write(self, copy: Path, is_over: Callable[[], bool]) -> None:
        """Writes the files that the copy lacks.

        Raises:
            OSError: a file cannot be copied, or the source changes meanwhile.
            GivenUp: `is_over` returned True first.
        """
        for unfinished in copy.parent.rglob(f"*{_UNFINISHED}"):
            unfinished.unlink(missing_ok=True)
        _Copying(self.source, copy, self._missing(copy), is_over).run()
        if self.list_parts(self.source) != self.parts:
            raise OSError(errno.ESTALE, "changed while it was copied", str(self.source))

    def _missing(self, copy: Path) -> list[SourceFile]:
        return [part for part in self.parts if not has_size(copy / part.name, part.size)]


def has_size(path: Path, size: int) -> bool:
    """Whether the file exists with this number of bytes."""
    with contextlib.suppress(OSError):
        return path.stat().st_size == size
    return False


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


def copied_parts(source: Path) -> list[SourceFile]:
    """Returns the files of a folder that a loader may read, at any depth, by name; of a file, itself as "".

    Raises:
        OSError: the source does not exist, or cannot be read.
    """
    if not source.is_dir():
        return [_part(source, "")]
    return sorted(_parts_below(source, ""), key=lambda part: part.name)


def media_parts(folder: Path) -> list[SourceFile]:
    """Returns all files of a folder at any depth, by name. No link is followed: whoever wrote the data could
    name any file of this machine by one. Its readers open what a copy lacks at its original place.

    Raises:
        OSError: the folder does not exist, or cannot be read.
    """
    return sorted(_files_below(folder, ""), key=lambda part: part.name)


def _files_below(folder: Path, prefix: str) -> Iterator[SourceFile]:
    with os.scandir(folder) as scanned:
        entries = list(scanned)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(Path(entry.path), f"{prefix}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            yield _part(Path(entry.path), f"{prefix}{entry.name}")


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
