"""Many tasks whose ends are awaited one by one: asyncio.wait over all costs their number each time."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Crowd:
    """Tasks under way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """One more."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended.put_nowait)

    async def one_end(self) -> None:
        """Wait until one of them has ended; raises what it raised."""
        task = await self._ended.get()
        self._tasks.discard(task)
        task.result()

    async def cancel(self) -> None:
        """End all, and wait for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
