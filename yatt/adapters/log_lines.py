"""The form of log lines: time with its offset from UTC, level, logger, message.

`yatt logs` merges the logs of processes on many machines by these times (`yatt.obs.log_lines`).
"""

import logging
import traceback
from datetime import datetime

from yatt.errors import line_of

MOST_CAUSES = 256
"""Number of causes whose tracebacks are remembered; then all are forgotten."""


class LineFormatter(logging.Formatter):
    """Formats records as lines; a message of several lines continues without a time."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002
        """Returns the record's time as ISO-8601 with milliseconds and offset, in this machine's time zone."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class OneTracebackPerCause(logging.Filter):
    """Shows the traceback of an error once. What fails at every request would fill a disk with copies: later
    ones are a line with their number."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[object, ...], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record pass; takes the traceback out of one whose cause is known."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, Exception):
            return True
        places = traceback.extract_tb(error.__traceback__, limit=-1)
        cause = (record.name, record.msg, type(error), *((each.filename, each.lineno) for each in places))
        if len(self._counts) >= MOST_CAUSES:
            self._counts.clear()
        self._counts[cause] = count = self._counts.get(cause, 0) + 1
        if count > 1:
            says = f"{record.getMessage()}: {line_of(error)} (number {count}; the traceback is at the first)"
            record.msg, record.args, record.exc_info, record.exc_text = says, None, None, None
        return True


def log_to_stderr() -> None:
    """Makes a worker process write its log lines, from level INFO on, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    handler.addFilter(OneTracebackPerCause())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
