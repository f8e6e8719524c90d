"""A process's log, written by a thread: an event loop must not wait for the filesystem of its log."""

import contextlib
import logging
import logging.handlers
import queue
import sys
from collections.abc import Iterator

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


@contextlib.contextmanager
def logging_by_a_thread(level: int = logging.INFO) -> Iterator[None]:
    """Within it what is logged goes to standard error by a thread; what still waits is written at the end."""
    waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(logging.Formatter(FORMAT))
    listener = logging.handlers.QueueListener(waiting, stream)
    root, handler = logging.getLogger(), logging.handlers.QueueHandler(waiting)
    root.setLevel(level)
    root.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        listener.stop()
