"""Awaits the ends of many tasks one by one; asyncio.wait would cost O(number of tasks) each time."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Crowd:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts one more task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended.put_nowait)

    async def one_end(self) -> None:
        """Waits until one task has ended; raises its exception."""
        task = await self._ended.get()
        self._tasks.discard(task)
        task.result()

    async def cancel(self) -> None:
        """Cancels all tasks and waits for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
