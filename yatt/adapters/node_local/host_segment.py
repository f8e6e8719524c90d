"""Named shared memory of a trainer rank's host copy: a page with a stamp, then data. No torch.

One process writes, others on the same node read. The stamp says of which attempt and version the data are.
The writer makes it invalid before it changes a byte and sets it after the last one, so a reader that finds
the same valid stamp before and after a copy has copied bytes of one version only (a sequence lock). This
relies on stores that other processors see in their order, as on x86-64.

A segment is a file in a node's memory folder; whoever removes that folder removes it.
"""

import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from yatt.errors import ConfigError, WorkerFailed

WEIGHTS, STATE, CRITIC, CRITIC_STATE = "weights", "state", "critic", "critic_state"
AREAS = (WEIGHTS, STATE, CRITIC, CRITIC_STATE)
"""Names of a rank's segments: the policy's parameters; main copies and moments of its optimizer; both of a
critic, which no engine reads."""

HEADER_BYTES = mmap.PAGESIZE
ALIGN_BYTES = 64
_MAGIC = int.from_bytes(b"yattseg1", "little")
_MAGIC_AT, _SEQUENCE_AT, _ATTEMPT_AT, _VERSION_AT = range(4)


@dataclass(frozen=True, slots=True)
class Stamp:
    """The attempt and the policy version of a segment's data."""

    attempt: int
    version: int


class SegmentWriter:
    """Creates a segment of a fixed size; the only writer.

    Args:
        size_bytes: of the data. All of it is allocated here, so that a full memory filesystem is an error now
            and not a SIGBUS later.

    Raises:
        ConfigError: the memory filesystem has not enough room.
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + size_bytes)
            self._map = mmap.mmap(descriptor, HEADER_BYTES + size_bytes)
        except OSError as error:
            path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            raise ConfigError(_no_room(path, size_bytes)) from error
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        self._words[_MAGIC_AT] = _MAGIC
        self._words[_SEQUENCE_AT] = 1
        self.data = memoryview(self._map)[HEADER_BYTES:]
        """The writable data."""

    def invalidate(self) -> None:
        """Makes the stamp invalid. Call it before the first byte is changed."""
        if self._words[_SEQUENCE_AT] % 2 == 0:
            self._words[_SEQUENCE_AT] += 1

    def complete(self, stamp: Stamp) -> None:
        """Sets the stamp. Call it after the last byte is written."""
        self.invalidate()
        self._words[_ATTEMPT_AT], self._words[_VERSION_AT] = stamp.attempt, stamp.version
        self._words[_SEQUENCE_AT] += 1


class SegmentReader:
    """A read-only view of another process's segment.

    Raises:
        WorkerFailed: there is no such segment.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise WorkerFailed(f"the host copy {path} cannot be opened: {error.strerror}") from error
        try:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes < HEADER_BYTES:
                raise WorkerFailed(f"{path} is not a host copy: it has {size_bytes} bytes")
            self._map = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        if self._words[_MAGIC_AT] != _MAGIC:
            raise WorkerFailed(f"{path} is not a host copy")
        self.data = memoryview(self._map)[HEADER_BYTES:]
        """The data; check `is_still` after each use."""

    def stamp(self) -> Stamp | None:
        """Returns the present stamp; None while the data are being changed."""
        before = self._words[_SEQUENCE_AT]
        found = Stamp(self._words[_ATTEMPT_AT], self._words[_VERSION_AT])
        is_valid = before % 2 == 0 and self._words[_SEQUENCE_AT] == before
        return found if is_valid else None

    def is_still(self, stamp: Stamp) -> bool:
        """Whether the data are of this attempt and version."""
        return self.stamp() == stamp

    def check(self, stamp: Stamp) -> None:
        """Refuses data of another version.

        Raises:
            WorkerFailed: they are of another attempt or version, or are being changed.
        """
        found = self.stamp()
        if found != stamp:
            now = f"version {found.version} of attempt {found.attempt}" if found else "being changed"
            raise WorkerFailed(
                f"{self._path} is {now}; version {stamp.version} of attempt {stamp.attempt} was asked for"
            )

    def close(self) -> None:
        """Unmaps the data. Views of it must have been released."""
        self._words.release()
        self.data.release()
        self._map.close()


def segment_path(stem: Path, area: str) -> Path:
    """Path of a segment of a rank's host copy."""
    return stem.with_name(f"{stem.name}.{area}")


def plan_path(stem: Path) -> Path:
    """Path of the plan (`m.SavePlan`, msgpack) beside the segments, written when they are created."""
    return stem.with_name(f"{stem.name}.plan")


def weight_plan_path(stem: Path) -> Path:
    """Path of the list of weights (`m.WeightPlan`, msgpack) beside the segments."""
    return stem.with_name(f"{stem.name}.weight-plan")


def aligned_size(size_bytes: int) -> int:
    """Rounds up to a multiple of `ALIGN_BYTES`."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _no_room(path: Path, size_bytes: int) -> str:
    found = os.statvfs(path.parent)
    free = found.f_bavail * found.f_frsize
    return (
        f"launch.shm_dir: the host copy of a trainer rank needs {size_bytes >> 20} MiB, and the memory "
        f"filesystem of {path.parent} has {free >> 20} MiB left. Use more GPUs, or name a larger one."
    )
