"""Sets of running tasks: of which each end is awaited, and of which none is."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Crowd:
    """Tasks whose ends are awaited one by one; asyncio.wait would cost O(number of tasks) each time."""

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


class Spawned:
    """Tasks whose ends nobody awaits. They are held here until then: asyncio itself does not."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` in a task of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancels all that run."""
        for task in self._tasks:
            task.cancel()

    async def end(self) -> None:
        """Cancels all that run, and waits for their end."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
