"""Waiting for a future with a deadline, without the task that asyncio.wait_for costs."""

import asyncio
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
