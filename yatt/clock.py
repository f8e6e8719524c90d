"""Reads the clocks, so that all other code can take times as numbers.

Monotonic seconds order events inside one process; the wall clock is only for labels that people read.
No decision compares times of two hosts.
"""

import time
from datetime import UTC, datetime


def monotonic_s() -> float:
    """Time of this host's monotonic clock in seconds."""
    return time.monotonic()


def monotonic_ns() -> int:
    """Time of this host's monotonic clock in nanoseconds."""
    return time.monotonic_ns()


def wall_s() -> float:
    """Current time in seconds since 1970, for people only."""
    return time.time()


def wall_iso() -> str:
    """Current time as ISO-8601 in UTC with milliseconds, for people and logs only."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
