"""Time as a value: the one place that reads the clocks, so that everything below it takes numbers.

Monotonic seconds order things inside one process; the wall clock only labels lines for people.
No decision compares times of two hosts.
"""

import time
from datetime import UTC, datetime


def monotonic_s() -> float:
    """Seconds of this host's monotonic clock."""
    return time.monotonic()


def monotonic_ns() -> int:
    """Nanoseconds of this host's monotonic clock."""
    return time.monotonic_ns()


def wall_iso() -> str:
    """Now as ISO-8601 in UTC with milliseconds, for people and logs only."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
