"""Reports to the leader about failures that a node cannot recover from by itself."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from yatt.errors import YattError
from yatt.obs.story.events import EventLog
from yatt.records.cluster import FailureReport
from yatt.records.events.attempts import FailureReported


class FailureReports:
    """Failure reports of one node, delivered in order by a task of their own.

    Args:
        deliver: sends one report to the leader, or puts it into the inbox on the leader's node.
    """

    def __init__(self, events: EventLog, deliver: Callable[[FailureReport], Awaitable[None]]) -> None:
        self._events, self._deliver = events, deliver
        self._queue: asyncio.Queue[FailureReport] = asyncio.Queue()

    def failed(self, error: str, exit_code: int, is_symptom: bool = False) -> None:
        """Reports a failure; the leader decides which consequence it has."""
        self._queue.put_nowait(FailureReport(error=error, exit_code=exit_code, is_symptom=is_symptom))

    async def run(self) -> None:
        """Delivers reports forever."""
        while True:
            report = await self._queue.get()
            self._events.emit(FailureReported(error=report.error, exit_code=report.exit_code))
            with contextlib.suppress(YattError):  # if the leader is lost, other parts handle that
                await self._deliver(report)
