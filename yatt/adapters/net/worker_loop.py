"""The main wait of a worker process with an event loop: until Stop, or until its controller has ended."""

import asyncio
import logging
import os

from yatt.adapters.net.channel import Channel
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, StaleAttempt

PARENT_CHECK_S = 1.0
_LOG = logging.getLogger(__name__)


async def serve_until_stopped(stop: asyncio.Event, channel: Channel, controller: int) -> int:
    """Waits for the end; returns the exit code.

    Args:
        stop: set by the order to stop.
        controller: pid of the parent process.
    """
    stopped = asyncio.create_task(stop.wait())
    failure = asyncio.create_task(channel.failure())
    try:
        while os.getppid() == controller:
            done, _ = await asyncio.wait(
                {stopped, failure}, timeout=PARENT_CHECK_S, return_when=asyncio.FIRST_COMPLETED
            )
            if stopped in done:
                return EXIT_FINISHED
            if failure in done:
                await failure
    except StaleAttempt as error:
        _LOG.warning("this attempt is over: %s", error)
        return error.exit_code
    finally:
        stopped.cancel()
        failure.cancel()
    return EXIT_FAILED
