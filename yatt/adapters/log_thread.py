"""A process's log, written by a thread: an event loop must not wait for the filesystem of its log.

A log that cannot be written costs lines, counted in the log itself, and never the process or its end.
"""

import contextlib
import logging
import logging.handlers
import os
import queue
import sys
import threading
from collections.abc import Iterator

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
MOST_WAITING = 10_000
LAST_S = 5.0
"""How long the last lines may take at the end."""

_Waiting = queue.Queue[logging.LogRecord | None]


class _Handler(logging.handlers.QueueHandler):
    """Drops what does not fit, and says how much it was as soon as there is room."""

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
    """Within it what is logged goes to standard error by a thread; what still waits is written at the end, if
    that takes at most `LAST_S`."""
    waiting: _Waiting = queue.Queue(most_waiting)
    root, handler = logging.getLogger(), _Handler(waiting)
    # Not by sys.stderr: a write that hangs would hold its lock, and the interpreter would wait at its end.
    writer = threading.Thread(target=_write, args=(waiting, sys.stderr.fileno()), name="log", daemon=True)
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
    formatter = logging.Formatter(FORMAT)
    while (record := waiting.get()) is not None:
        data = formatter.format(record).encode(errors="replace") + b"\n"
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(descriptor, data) :]
