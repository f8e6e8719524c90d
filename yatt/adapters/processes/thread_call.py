"""Runs a blocking call in its own thread, and awaits it.

Not asyncio.to_thread: calls that never return (a user's function after its timeout) would use up its pool,
and the interpreter waits for pool threads at exit. A daemon thread that never returns costs only that thread.
"""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Any


async def call_in_thread(function: Callable[[], Any]) -> Any:
    """Returns the function's result or raises its exception. If cancelled, the thread runs on.

    Raises:
        OSError: EAGAIN, if this process cannot start a thread now.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        try:
            outcome = (future.set_result, function())
        except BaseException as error:  # noqa: BLE001 - raised again in the awaiting task
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            # sys.exit() in it must not end the process, and a future refuses StopIteration
            outcome = (future.set_exception, error if is_plain else RuntimeError(repr(error)))
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(settle, *outcome)

    try:
        threading.Thread(target=run, name="user-call", daemon=True).start()
    except RuntimeError as error:  # Python reports a failed thread start so
        raise OSError(errno.EAGAIN, str(error)) from error
    return await future
