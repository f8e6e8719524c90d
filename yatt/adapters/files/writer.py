"""Writes files for users in a thread: if the filesystem is slow, full or missing, lines are dropped and
counted, and nothing else fails.

Lines wait in memory up to a limit; beyond it the oldest are dropped. A failed write is retried forever, with
a pause: a caller that needs a line to be written calls `flush`, with a deadline. After an error, the file is
read to find how much of a batch was written: each line is written exactly once, also after a short write.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from yatt import clock

_LOG = logging.getLogger(__name__)
MOST_BYTES = 32 << 20
PAUSE_S = 0.5
HANG_S = 2.0
"""A write that takes longer counts as failing."""

AT_ONCE = 512
"""Maximum number of lines of one file per write."""

BETWEEN_S = 0.02
"""Least time between two rounds of writes: of a thousand lines a second, each would open the file and wake
the thread. A round has all that waits when it begins; a line after a pause is written at once."""


@dataclass(slots=True)
class _Job:
    path: Path | None
    data: bytes
    work: Callable[[], None] | None


@dataclass(slots=True)
class _Batch:
    """The current write: one call, or lines of one file with the offset of the last try in `place`."""

    jobs: list[_Job]
    place: Path | None = None
    inode: int = 0
    begin: int = 0
    lead: bytes = b""

    def drop_landed(self, descriptor: int) -> None:
        """Removes the lines that the last try has written, even if it reported an error. If only the newline
        of a line is missing, the next write adds it first."""
        sent = self.lead + b"".join(job.data for job in self.jobs)
        num_landed = _num_equal(os.pread(descriptor, len(sent), self.begin), sent) - len(self.lead)
        while self.jobs and num_landed >= len(self.jobs[0].data) - 1:
            num_landed -= len(self.jobs.pop(0).data)


class _Queue:
    """What waits to be written. The lines among it have a limit, beyond which the oldest are dropped."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self.jobs: deque[_Job] = deque()
        self.num_lost = 0

    def put(self, jobs: list[_Job], num_bytes: int) -> None:
        """Adds jobs, lines of so many bytes."""
        self.jobs.extend(jobs)
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes:
            oldest = next((each for each in self.jobs if each.work is None), None)
            if oldest is None:
                break
            self.jobs.remove(oldest)
            self._num_bytes -= len(oldest.data)
            self.num_lost += 1

    def take(self) -> _Batch:
        """Takes the first job, and following lines of the same file. From now on they are not dropped."""
        first = self.jobs.popleft()
        batch = [first]
        while first.path and self.jobs and self.jobs[0].path == first.path and len(batch) < AT_ONCE:
            batch.append(self.jobs.popleft())
        self._num_bytes -= sum(len(job.data) for job in batch)
        return _Batch(batch)


@dataclass(slots=True)
class _Health:
    """Since when writes fail, and since when the present one lasts, in seconds of the monotonic clock."""

    failing_since_s: float | None = None
    writing_since_s: float | None = None

    @property
    def failing_s(self) -> float:
        """Seconds without a successful write."""
        now_s, failing_s, writing_s = clock.monotonic_s(), self.failing_since_s, self.writing_since_s
        if failing_s is not None:
            return now_s - failing_s
        return now_s - writing_s if writing_s is not None and now_s - writing_s > HANG_S else 0.0


class BackgroundWriter:
    """A thread that appends lines and makes other small writes, in order.

    Args:
        most_bytes: limit of the waiting lines.
        place: returns the file to append to instead of the given one (`yatt.adapters.files.segments`); called
            in the thread, before each write.
    """

    def __init__(
        self, most_bytes: int = MOST_BYTES, place: Callable[[Path], Path] = lambda path: path
    ) -> None:
        self._place, self._queue, self._health = place, _Queue(most_bytes), _Health()
        self._batch: _Batch | None = None
        lock = threading.Lock()
        self._arrival, self._changed = threading.Condition(lock), threading.Condition(lock)
        """The thread waits for the first, callers of `flush` for the second."""
        self._is_idle = self._is_closing = False
        self._num_flushing = 0
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def append(self, path: Path, line: str) -> None:
        """Queues lines for a file; several lines in `line` count separately."""
        data = line.encode(errors="replace")
        self._put([_Job(path, each + b"\n", None) for each in data.split(b"\n")], len(data) + 1)

    def call(self, work: Callable[[], None]) -> None:
        """Queues another write; it is called again if it raises OSError."""
        self._put([_Job(None, b"", work)], 0)

    @property
    def failing_s(self) -> float:
        """Seconds without a successful write, because of errors or a hanging write; 0 if writing works."""
        return self._health.failing_s

    @property
    def num_lost(self) -> int:
        """Number of lines dropped because too many waited, and of writes that failed permanently."""
        return self._queue.num_lost

    def flush(self, limit_s: float) -> bool:
        """Waits until everything is written; returns False after `limit_s`. Blocks: not for an event loop."""
        with self._changed:
            self._num_flushing += 1
            self._arrival.notify()
            try:
                return self._changed.wait_for(lambda: not self._queue.jobs and self._batch is None, limit_s)
            finally:
                self._num_flushing -= 1

    def close(self, limit_s: float) -> bool:
        """Flushes and ends the thread; returns False if something was not written in time."""
        is_done = self.flush(limit_s)
        with self._changed:
            self._is_closing = True
            self._arrival.notify()
        self._thread.join(timeout=1.0)
        return is_done

    def _put(self, jobs: list[_Job], num_bytes: int) -> None:
        with self._changed:
            self._queue.put(jobs, num_bytes)
            if self._is_idle:
                self._arrival.notify()

    def _run(self) -> None:
        num_left = 0  # jobs of this round
        while True:
            with self._arrival:
                self._is_idle = True
                self._arrival.wait_for(lambda: self._queue.jobs or self._is_closing)
                self._is_idle = False
                if self._is_closing:
                    return
                num_left = num_left or len(self._queue.jobs)
                self._batch = self._queue.take()
                num_left = max(0, num_left - len(self._batch.jobs))
            while not self._is_over(self._batch):
                self._health.failing_since_s = self._health.failing_since_s or clock.monotonic_s()
                with self._arrival:
                    if self._arrival.wait_for(lambda: self._is_closing, PAUSE_S):
                        return
            self._health.failing_since_s = None
            with self._arrival:
                self._batch = None
                self._changed.notify_all()
                if not num_left:
                    self._arrival.wait_for(lambda: self._num_flushing or self._is_closing, BETWEEN_S)

    def _is_over(self, batch: _Batch) -> bool:
        """Tries to write the batch; returns True also if it can never be written."""
        self._health.writing_since_s = clock.monotonic_s()
        try:
            self._write(batch)
        except OSError:
            return False
        except Exception:  # noqa: BLE001 - logged; the next write must still be made
            self._queue.num_lost += len(batch.jobs)
            _LOG.exception("a write of events or metrics failed permanently; it is skipped")
        finally:
            self._health.writing_since_s = None
        return True

    def _write(self, batch: _Batch) -> None:
        if not batch.jobs:  # everything was written
            return
        first = batch.jobs[0]
        if first.work is not None:
            first.work()
            return
        assert first.path is not None, "a job is a line or a call"
        batch.place = batch.place or self._place(first.path)  # once, or what a failed try wrote is not found
        descriptor = os.open(batch.place, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            found = os.fstat(descriptor)
            if found.st_ino == batch.inode:
                batch.drop_landed(descriptor)
            is_whole = not found.st_size or os.pread(descriptor, 1, found.st_size - 1) == b"\n"
            batch.inode, batch.begin, batch.lead = found.st_ino, found.st_size, b"" if is_whole else b"\n"
            data = batch.lead + b"".join(job.data for job in batch.jobs)
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)


def _num_equal(left: bytes, right: bytes) -> int:
    """Returns the length of the longest common prefix."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)
