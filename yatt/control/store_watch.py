"""Says in the event log that the checkpoint store is waited for, and that it answers again."""

import asyncio
from collections.abc import Callable
from functools import partial

from yatt.obs.events import EventLog


def store_sayer(events: EventLog, who: str) -> Callable[[str], None]:
    """What a `PatientStore` of this process tells its waits to, in whatever thread it is used.

    Call it in the event loop that events are emitted in.
    """
    loop = asyncio.get_running_loop()

    def say(error: str) -> None:
        loop.call_soon_threadsafe(partial(events.emit, "store.wait", who=who, error=error))

    return say
