"""Retries calls after transient filesystem errors, until a deadline."""

import errno
import math
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from yatt import clock
from yatt.errors import EXIT_FAILED, StoreUnreachable, YattError

T = TypeVar("T")
PASSING = frozenset(
    getattr(errno, name)
    for name in (
        "EIO",
        "ESTALE",
        "ESHUTDOWN",
        "ENOSPC",
        "EDQUOT",
        "ETIMEDOUT",
        "EAGAIN",
        "ENOTCONN",
        "EHOSTDOWN",
        "ECONNRESET",
        "EINTR",
        "EBUSY",
        "ENETUNREACH",
        "EREMOTEIO",
        "EHOSTUNREACH",
        "EPROTO",
        "ENOMEM",
        "ENFILE",
    )
)
"""Transient errors of a shared filesystem, or of a machine that is short of resources."""

LIMIT_S = 120.0
FIRST_S, MOST_S = 0.1, 5.0


def is_passing(error: BaseException) -> bool:
    """Whether the error is, or was caused by, a transient error of a filesystem or store."""
    if isinstance(error, StoreUnreachable) and error.is_passing:
        return True
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in PASSING


def exit_code_of(error: YattError) -> int:
    """Returns the exit code for an error: a transient error is never a user error."""
    return EXIT_FAILED if is_passing(error) else error.exit_code


def ended_by(error: YattError | OSError, who: str) -> int:
    """Writes one line about the error to stderr; returns the exit code for it."""
    if isinstance(error, YattError):
        sys.stderr.write(f"{clock.wall_iso()} ERROR {who}: {error}\n")
        return exit_code_of(error)
    says = f"{error.filename or 'a file'}: {error.strerror or error}"
    sys.stderr.write(f"{clock.wall_iso()} ERROR {who}: {says}\n")
    return EXIT_FAILED


def with_retries(
    work: Callable[[], T],
    *,
    limit_s: float = LIMIT_S,
    on_failure: Callable[[Exception], None] = lambda _: None,
) -> T:
    """Returns the result of `work`; retries after transient errors. Blocks: not for an event loop.

    Args:
        limit_s: time limit from the first failure on, also if the failed call was slow.
        on_failure: called with each error that is retried.

    Raises:
        OSError: an error that is not transient, or the last one after `limit_s`.
        YattError: an error not caused by a transient one, or the last one after `limit_s`.
    """
    until_s, pause_s = math.inf, FIRST_S
    while True:
        try:
            return work()
        except (OSError, YattError) as error:
            until_s = min(until_s, clock.monotonic_s() + limit_s)
            if not is_passing(error) or clock.monotonic_s() >= until_s:
                raise
            on_failure(error)
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(MOST_S, pause_s * 2)


QUIET_S = 10.0
"""Time after which a first call that has not ended is reported."""

TOLD_S = 0.2


def until_answered(
    work: Callable[[], T],
    *,
    errors: tuple[type[Exception], ...],
    limit_s: float,
    is_told: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _: None,
) -> T | None:
    """Returns the result of `work`; retries after `errors`; returns None once `is_told()`.

    Each call runs in a daemon thread: while one hangs, a signal still ends the wait.

    Args:
        say: called once, with the error, if the first call fails or takes more than `QUIET_S`.

    Raises:
        One of `errors`, the last one, after `limit_s`; TimeoutError if every call hung.
    """
    began_s, pause_s, has_said = clock.monotonic_s(), FIRST_S, False
    last: Exception = TimeoutError("no answer")
    call = _Call(work)
    while not is_told():
        waited_s = clock.monotonic_s() - began_s
        if call.has_ended(TOLD_S):
            if not isinstance(call.error, errors):
                return call.result()
            last = call.error
        if not has_said and (call.error is not None or waited_s > QUIET_S):
            has_said = True
            say(str(last))
        if waited_s > limit_s:
            raise last
        if call.error is not None:
            _pause(pause_s * random.uniform(0.5, 1.0), is_told)
            pause_s, call = min(MOST_S, pause_s * 2), _Call(work)
    return None


def _pause(seconds: float, is_told: Callable[[], bool]) -> None:
    until_s = clock.monotonic_s() + seconds
    while (left_s := until_s - clock.monotonic_s()) > 0 and not is_told():
        time.sleep(min(TOLD_S, left_s))


class _Call(Generic[T]):
    """One call in its own daemon thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._ends: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
        self._value: T | None = None
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="patient-call", daemon=True).start()

    def _run(self) -> None:
        try:
            self._ends.put((self._work(), None))
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self._ends.put((None, error))

    def has_ended(self, limit_s: float) -> bool:
        """Waits up to `limit_s` for the end of the call; returns whether it has ended."""
        try:
            self._value, self.error = self._ends.get(timeout=limit_s)
        except queue.Empty:
            return False
        return True

    def result(self) -> T | None:
        """Returns the result of an ended call, or raises its exception."""
        if self.error is not None:
            raise self.error
        return self._value
