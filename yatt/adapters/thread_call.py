"""A blocking call in a thread of its own, awaited.

Not asyncio.to_thread: its pool would be used up by calls that never return (a user's function after its
timeout), and the interpreter waits for pool threads at exit. A daemon thread that never returns costs
one thread and nothing else.
"""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Any


async def call_in_thread(function: Callable[[], Any]) -> Any:
    """The function's result, or what it raised. Cancelled: the thread runs on, its result is dropped.

    Raises:
        OSError: EAGAIN, if this process may have no more threads now.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        try:
            outcome = (future.set_result, function())
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            # sys.exit() in it must not end the process, and a future refuses StopIteration
            outcome = (future.set_exception, error if is_plain else RuntimeError(repr(error)))
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    try:
        threading.Thread(target=run, name="user-call", daemon=True).start()
    except RuntimeError as error:  # what Python makes of it
        raise OSError(errno.EAGAIN, str(error)) from error
    return await future
