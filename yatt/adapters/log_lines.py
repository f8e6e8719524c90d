"""The form of log lines: time with its offset from UTC, level, logger, message.

`yatt logs` merges the logs of processes on many machines by these times (`yatt.obs.log_lines`).
"""

import logging
from datetime import datetime


class LineFormatter(logging.Formatter):
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
