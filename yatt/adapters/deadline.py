"""Waiting for a future with a deadline, without the task that asyncio.wait_for costs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def within(future: "asyncio.Future[T]", limit_s: float) -> T:
    """The future's result. Whoever awaits this owns the future: nobody else sets the TimeoutError.

    Raises:
        TimeoutError: not there after `limit_s`.
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
    """The result of `work`, however long it takes, as long as `progress()` changes.

    Raises:
        TimeoutError: nothing moved for `limit_s`; `work` is cancelled.
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
