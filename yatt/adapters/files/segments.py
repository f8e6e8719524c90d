"""An unbounded file of JSON lines, kept in segments: events.jsonl, events.000001.jsonl and so on.

Lines are appended to the newest segment until it is full; then the next one is started and the oldest
segments beyond a limit are deleted. Nothing is renamed or truncated: a killed writer leaves at most an
incomplete last line, two concurrent writers lose nothing, and a reader keeps its position: it reads each
segment to its end and continues with the next.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from yatt.adapters.files.lines import Record, T, Tail, last_records

CHUNK_BYTES = 4 << 20
"""Maximum bytes of lines that a reader holds as records at the same time."""

WATCHED = 3
"""Number of newest segments that a reader checks again. A second writer may still append to the previous one,
if it looked for the newest just before the next one was started."""


def segments_of(first: Path) -> dict[int, Path]:
    """Returns the existing segments by number, oldest first; `first` has number 0."""
    pattern = re.compile(rf"{re.escape(first.stem)}(?:\.(\d{{6}}))?{re.escape(first.suffix)}")
    try:
        found = map(pattern.fullmatch, os.listdir(first.parent))
    except OSError:
        return {}
    numbers = sorted(int(match[1] or 0) for match in found if match)
    return {number: log_segment_path(first, number) for number in numbers}


def log_segment_path(first: Path, number: int) -> Path:
    """Returns the path of one segment."""
    return first.with_name(f"{first.stem}.{number:06d}{first.suffix}") if number else first


def newest_segment(first: Path) -> Path:
    """Returns the segment to append to; `first` if there is none."""
    return next(reversed(segments_of(first).values()), first)


@dataclass(slots=True)
class Rotation:
    """Selects the segment to which a writer appends.

    Args:
        first: the first segment, which names the whole.
        most_bytes: size at which a segment is full.
        keep: number of segments to keep.
    """

    first: Path
    most_bytes: int
    keep: int
    _number: int = field(default=-1, init=False)

    def place(self, path: Path) -> Path:
        """Returns the segment to append to if `path` is `first`; any other path unchanged.

        Raises:
            OSError: the folder does not answer.
        """
        if path != self.first:
            return path
        if self._number < 0 or os.path.lexists(
            log_segment_path(path, self._number + 1)
        ):  # started by another writer
            self._number = max(segments_of(path), default=0)
        if self._is_full(log_segment_path(path, self._number)):
            there = segments_of(path)
            self._number = max(there, default=0) + 1
            for number, old in there.items():
                if number <= self._number - self.keep:
                    old.unlink(missing_ok=True)
        return log_segment_path(path, self._number)

    def _is_full(self, path: Path) -> bool:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return False
        return found.st_size >= self.most_bytes or not stat.S_ISREG(found.st_mode)


class SegmentTail(Generic[T]):
    """Reads new complete lines of all segments, in order, each line once.

    Args:
        accept: see `Tail`.
    """

    def __init__(self, first: Path, accept: Callable[[Record], T | None]) -> None:
        self._first, self._accept = first, accept
        self._tails: dict[int, Tail[T]] = {}
        self._done = -1
        self._num_skipped = 0  # in segments that are not read any more

    @property
    def unreadable(self) -> int:
        """Number of unreadable lines so far, including incomplete last lines."""
        return self._num_skipped + sum(tail.skipped + tail.has_torn_end for tail in self._tails.values())

    def batches(self) -> Iterator[list[T]]:
        """Yields new records in batches of at most about `CHUNK_BYTES`."""
        there = segments_of(self._first)
        for number, path in there.items():
            if number > self._done:
                tail = self._tails.setdefault(number, Tail(path, self._accept))
                yield tail.read(CHUNK_BYTES)[0]
                while tail.has_more:
                    yield tail.read(CHUNK_BYTES)[0]
        watched = list(there)[-WATCHED:]
        for number in [each for each in self._tails if each not in watched]:
            tail = self._tails.pop(number)
            self._num_skipped += tail.skipped + tail.has_torn_end
            self._done = max(self._done, number)


def newest_records(first: Path, num_bytes: int) -> Iterator[Record]:
    """Yields the readable records in the last `num_bytes` of all segments, newest first."""
    for path in reversed(segments_of(first).values()):
        if num_bytes <= 0:
            return
        yield from reversed(last_records(path, num_bytes))
        num_bytes -= path.stat().st_size if path.is_file() else 0
