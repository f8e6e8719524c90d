"""Calls a function when a descriptor is readable, and not more often than needed."""

import asyncio
from collections.abc import Callable


class PacedReader:
    """Reads a descriptor in the event loop.

    With `pause_s`, the first message after a pause is read at once, and those that follow every `pause_s`
    seconds until none comes: a thousand messages a second would else wake the loop a thousand times.

    Args:
        drain: reads everything that is there; returns whether there was something.
    """

    def __init__(self, descriptor: int, drain: Callable[[], bool], pause_s: float) -> None:
        self._descriptor, self._drain, self._pause_s = descriptor, drain, pause_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._loop.add_reader(descriptor, self._readable)

    def close(self) -> None:
        """Reads no more; call it before the descriptor is closed. Later calls do nothing, because its number
        may be another socket's by then."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)
        if self._timer is not None:
            self._timer.cancel()

    def _readable(self) -> None:
        self._drain()
        if self._pause_s and not self._is_closed:
            self._loop.remove_reader(self._descriptor)
            self._timer = self._loop.call_later(self._pause_s, self._look)

    def _look(self) -> None:
        has_read = self._drain()
        if self._is_closed:
            return
        if has_read:
            self._timer = self._loop.call_later(self._pause_s, self._look)
        else:
            self._loop.add_reader(self._descriptor, self._readable)
