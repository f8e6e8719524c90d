"""Waits for a future with a deadline, without the extra task of asyncio.wait_for."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def result_within(future: "asyncio.Future[T]", limit_s: float) -> T:
    """Returns the future's result. Only one caller may await it, because a timeout sets TimeoutError.

    Raises:
        TimeoutError: no result after `limit_s`.
    """
    timer = future.get_loop().call_later(limit_s, _expire, future)
    try:
        return await future
    finally:
        timer.cancel()


def _expire(future: "asyncio.Future[T]") -> None:
    if not future.done():
        future.set_exception(TimeoutError())


async def while_moving(work: Awaitable[T], limit_s: float, progress: Callable[[], object]) -> T:
    """Returns the result of `work`, without a time limit as long as `progress()` changes.

    Raises:
        TimeoutError: no progress for `limit_s`; `work` is cancelled.
    """
    task, quiet_s, known = asyncio.ensure_future(work), 0.0, progress()
    step_s = min(1.0, limit_s)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=step_s)
            if done:
                return task.result()
            quiet_s, known = (0.0, now) if (now := progress()) != known else (quiet_s + step_s, known)
            if quiet_s >= limit_s:
                raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
