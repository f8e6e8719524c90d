"""The watch of orphans can be cancelled at any moment: else its controller would never end."""

import asyncio

import pytest

from tests.runs import HANG_S
from yatt.control.gpus.processes.supervisor import OrphanWatch


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_just_after_the_end_of_a_worker_is_not_lost(turns: int) -> None:
    async def scene() -> None:
        watch, looked = OrphanWatch(dict), asyncio.Event()

        async def look() -> None:
            looked.set()

        watch.look = look  # type: ignore[method-assign]
        running = asyncio.ensure_future(watch.run())
        await looked.wait()
        await asyncio.sleep(0.01)
        watch.worker_ended()
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        _, pending = await asyncio.wait({running}, timeout=HANG_S)
        running.cancel()
        assert not pending

    asyncio.run(scene())
