"""Calls that a passing trouble of a filesystem must not fail: tried again until a deadline."""

import errno
import random
import time
from collections.abc import Callable
from typing import TypeVar

from yatt import clock

T = TypeVar("T")
PASSING = frozenset(
    getattr(errno, name)
    for name in (
        "EIO", "ESTALE", "ESHUTDOWN", "ENOSPC", "EDQUOT", "ETIMEDOUT", "EAGAIN", "ENOTCONN", "EHOSTDOWN",
        "ECONNRESET", "EINTR", "EBUSY", "ENETUNREACH", "EREMOTEIO", "EHOSTUNREACH", "EPROTO",
    )
)  # fmt: skip
"""Errors that a shared filesystem may give and take back."""

LIMIT_S = 120.0
FIRST_S, MOST_S = 0.1, 5.0


def patiently(work: Callable[[], T], *, limit_s: float = LIMIT_S) -> T:
    """The result of `work`, which is called again after a passing error. Blocks: not for an event loop.

    Raises:
        OSError: another error than a passing one, or the last one after `limit_s`.
    """
    until_s, pause_s = clock.monotonic_s() + limit_s, FIRST_S
    while True:
        try:
            return work()
        except OSError as error:
            if error.errno not in PASSING or clock.monotonic_s() > until_s:
                raise
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(MOST_S, pause_s * 2)
