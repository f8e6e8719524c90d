"""Writes for people, by a thread: a filesystem that is slow, full or away costs lines, counted, and nothing
else.

Lines wait in memory up to a bound; beyond it the oldest are lost. An error is tried again for ever, with a
pause: whoever needs a line to be there asks `flush`, with a deadline.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from yatt import clock

MOST_BYTES = 32 << 20
PAUSE_S = 0.5
AT_ONCE = 512
"""Lines of one file that go in one write."""


@dataclass(frozen=True, slots=True)
class _Job:
    path: Path | None
    data: bytes
    work: Callable[[], None] | None


class BackgroundWriter:
    """One thread that appends lines and does other small writes, in order.

    Args:
        most_bytes: of lines that wait.
        place: gives the file to append to in place of the one that was named (`yatt.adapters.segments`);
            called in the thread, before each write.
    """

    def __init__(
        self, most_bytes: int = MOST_BYTES, place: Callable[[Path], Path] = lambda path: path
    ) -> None:
        self._place, self._most_bytes, self._num_bytes = place, most_bytes, 0
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._is_closing, self._had_error = False, False
        self._failing_since_s: float | None = None
        self.num_lost = 0
        """Lines that were dropped because too much waited."""
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def append(self, path: Path, line: str) -> None:
        """Append a line to a file, soon."""
        self._put(_Job(path, line.encode() + b"\n", None))

    def call(self, work: Callable[[], None]) -> None:
        """Do another write, in its turn; it is called again if it raises OSError."""
        self._put(_Job(None, b"", work))

    @property
    def failing_s(self) -> float:
        """Since when nothing can be written; 0 if it can."""
        since_s = self._failing_since_s
        return 0.0 if since_s is None else clock.monotonic_s() - since_s

    def flush(self, limit_s: float) -> bool:
        """Wait until all is written; False if it is not in time. Blocks: not for an event loop."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, limit_s)

    def close(self, limit_s: float) -> bool:
        """Flush and end the thread; False if something was not written in time."""
        is_done = self.flush(limit_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        return is_done

    def _put(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._num_bytes += len(job.data)
            while self._num_bytes > self._most_bytes:
                oldest = next((each for each in self._jobs if each.work is None), None)
                if oldest is None:
                    break
                self._jobs.remove(oldest)
                self._num_bytes -= len(oldest.data)
                self.num_lost += 1
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closing)
                if self._is_closing:
                    return
                batch = self._batch()
            try:
                self._write(batch)
            except OSError:
                self._failed()
                continue
            self._failing_since_s, self._had_error = None, False
            with self._changed:
                for job in batch:
                    if self._jobs and self._jobs[0] is job:  # not dropped meanwhile
                        self._jobs.popleft()
                        self._num_bytes -= len(job.data)
                self._changed.notify_all()

    def _failed(self) -> None:
        self._had_error = True
        if self._failing_since_s is None:
            self._failing_since_s = clock.monotonic_s()
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, PAUSE_S)

    def _batch(self) -> list[_Job]:
        """The first job, and lines of the same file that follow it."""
        first = self._jobs[0]
        batch = [first]
        for job in islice(self._jobs, 1, AT_ONCE) if first.path else ():
            if job.path != first.path:
                break
            batch.append(job)
        return batch

    def _write(self, batch: list[_Job]) -> None:
        first = batch[0]
        if first.work is not None:
            first.work()
            return
        assert first.path is not None, "a job is a line or a call"
        # After an error half a line may be there: what follows begins a new one.
        data = (b"\n" if self._had_error else b"") + b"".join(job.data for job in batch)
        descriptor = os.open(self._place(first.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)
