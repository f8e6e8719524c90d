"""Writes a process's log in a thread, because an event loop must not wait for the log's filesystem.

If the log cannot be written, lines are dropped and counted in it; the process is not affected.
"""

import contextlib
import logging
import logging.handlers
import os
import queue
import sys
import threading
from collections.abc import Iterator

from yatt.adapters.processes.log_lines import LineFormatter, TracebackFormatter

MOST_WAITING = 10_000
LAST_S = 5.0
"""Time limit for writing the last lines at the end."""

_Waiting = queue.Queue[logging.LogRecord | None]


class _Handler(logging.handlers.QueueHandler):
    """Drops lines when the queue is full, and logs their number once there is room."""

    def __init__(self, waiting: _Waiting) -> None:
        super().__init__(waiting)
        self._waiting, self._num_lost = waiting, 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self._num_lost:
                says = f"{self._num_lost} lines of this log were lost: it could not be written"
                self._waiting.put_nowait(
                    logging.LogRecord(__name__, logging.WARNING, __file__, 0, says, None, None)
                )
                self._num_lost = 0
            self._waiting.put_nowait(record)
        except queue.Full:
            self._num_lost += 1


@contextlib.contextmanager
def logging_by_a_thread(level: int = logging.INFO, most_waiting: int = MOST_WAITING) -> Iterator[None]:
    """Context manager: log lines go to standard error by a thread; the remaining lines are written at the
    end, within `LAST_S`."""
    waiting: _Waiting = queue.Queue(most_waiting)
    root, handler = logging.getLogger(), _Handler(waiting)
    # Not through sys.stderr: a hanging write would hold its lock, and the interpreter's exit would hang too.
    writer = threading.Thread(target=_write, args=(waiting, sys.stderr.fileno()), name="log", daemon=True)
    handler.setFormatter(TracebackFormatter())
    root.setLevel(level)
    root.addHandler(handler)
    writer.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        with contextlib.suppress(queue.Full):
            waiting.put(None, timeout=LAST_S)
        writer.join(LAST_S)


def _write(waiting: _Waiting, descriptor: int) -> None:
    formatter = LineFormatter()
    while (record := waiting.get()) is not None:
        data = formatter.format(record).encode(errors="replace") + b"\n"
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(descriptor, data) :]
