"""Reports in the event log when a wait for the checkpoint store begins and ends."""

import asyncio
from collections.abc import Callable
from functools import partial

from yatt.obs.events import EventLog


def store_sayer(events: EventLog, who: str) -> Callable[[str], None]:
    """Returns the function with which a `PatientStore` of this process reports waits, from any thread.

    Call it in the event loop that emits the events.
    """
    loop = asyncio.get_running_loop()

    def say(error: str) -> None:
        loop.call_soon_threadsafe(partial(events.emit, "store.wait", who=who, error=error))

    return say
