"""The form of log lines: time with its offset from UTC, level, logger, message.

`yatt logs` merges the logs of processes on many machines by these times (`yatt.obs.terminal.log_lines`).
"""

import copy
import logging
from collections.abc import Iterator
from datetime import datetime
from types import TracebackType

from yatt.errors import error_line

MOST_CAUSES = 256
"""Number of causes whose tracebacks are counted; then all are forgotten."""

SHOWN_EVERY = 100
"""A traceback is shown the first time, the hundredth, the ten thousandth: a log may have been cut."""

MOST_ERRORS = 20
"""Number of errors in a chain or group that are told apart."""


class TracebackFormatter(logging.Formatter):
    """Shows the traceback of a cause once in a hundred times. What fails at every request would fill a disk
    with copies: the other times are a line with their number.

    A cause is where it was logged and all that has led there: the errors of the chain and of groups with the
    places that they came through, not their texts.
    """

    def __init__(self, form: str = "%(message)s") -> None:
        super().__init__(form)
        self._counts: dict[int, int] = {}

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's text. The record is not changed: others format it too."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, Exception):
            return super().format(record)
        count = self._count(hash((record.pathname, record.lineno, *_places(error))))
        if _is_shown(count):
            return super().format(record)
        short = copy.copy(record)
        short.exc_info = short.exc_text = None
        return f"{super().format(short)}: {error_line(error)} ({count} times so far; its traceback is above)"

    def _count(self, cause: int) -> int:
        if len(self._counts) >= MOST_CAUSES:
            self._counts.clear()
        self._counts[cause] = self._counts.get(cause, 0) + 1
        return self._counts[cause]


def _is_shown(count: int) -> bool:
    while count % SHOWN_EVERY == 0:
        count //= SHOWN_EVERY
    return count == 1


def _places(error: BaseException) -> Iterator[object]:
    """Yields the kind of each error of a chain and of its groups, and file and line of all its frames."""
    todo, seen = [error], set[int]()
    while todo and len(seen) < MOST_ERRORS:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield type(each).__qualname__
        yield from _frames(each.__traceback__)
        before = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        inner = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        todo += [*inner, *([before] if before is not None else [])]


def _frames(trace: TracebackType | None) -> Iterator[object]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename
        yield trace.tb_lineno
        trace = trace.tb_next


class LineFormatter(TracebackFormatter):
    """Formats records as lines; a message of several lines continues without a time."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002
        """Returns the record's time as ISO-8601 with milliseconds and offset, in this machine's time zone."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def log_to_stderr() -> None:
    """Makes a worker process write its log lines, from level INFO on, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
