"""A descriptor is read at once after a pause, and not for every message while many come."""

import asyncio
import os
from collections.abc import Callable

from tests.runs import HANG_S, turns
from yatt.adapters.net.paced_reader import PacedReader


class Pipe:
    def __init__(self, pause_s: float) -> None:
        self.end, self.begin = os.pipe()
        os.set_blocking(self.end, False)
        self.num_looks, self.got = 0, b""
        self.reader = PacedReader(self.end, self.drain, pause_s)

    def drain(self) -> bool:
        self.num_looks += 1
        try:
            data = os.read(self.end, 1000)
        except BlockingIOError:
            return False
        self.got += data
        return True

    async def said(self, data: bytes) -> None:
        os.write(self.begin, data)
        for _ in range(3):
            await asyncio.sleep(0)

    def close(self) -> None:
        self.reader.close()
        os.close(self.begin)
        os.close(self.end)


class Pauses:
    """The pauses that the reader asks its loop for; a test ends them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.call_later = self.ask  # type: ignore[method-assign]
        self.asked: list[Callable[[], object]] = []

    def ask(self, _pause_s: float, then: Callable[[], object]) -> None:
        self.asked.append(then)

    def end(self) -> None:
        """Ends the one that there is."""
        (then,) = self.asked
        self.asked.clear()
        then()


def test_the_first_is_read_at_once_and_the_next_ones_together() -> None:
    async def scene() -> None:
        pipe, pauses = Pipe(pause_s=0.2), Pauses()
        await pipe.said(b"a")
        assert pipe.got == b"a"
        for _ in range(50):
            await pipe.said(b"b")
        assert (pipe.got, pipe.num_looks) == (b"a", 1)
        pauses.end()
        assert (len(pipe.got), pipe.num_looks) == (51, 2)
        pauses.end()
        assert pipe.num_looks == 3, "it found nothing"
        await turns()
        assert pipe.num_looks == 3 and not pauses.asked, "nothing wakes it"
        await pipe.said(b"c")
        assert pipe.got.endswith(b"c"), "at once again"
        del pauses.loop.call_later
        pipe.close()

    asyncio.run(scene())


def test_a_second_end_does_not_touch_a_descriptor_that_got_the_same_number() -> None:
    async def scene() -> None:
        old = Pipe(pause_s=0.0)
        old.close()
        new = Pipe(pause_s=0.0)
        assert new.end == old.end, "the lowest free number"
        old.reader.close()
        await new.said(b"a")
        assert new.got == b"a"
        new.close()

    asyncio.run(asyncio.wait_for(scene(), HANG_S))


def test_without_a_pause_everything_is_read_at_once_and_after_the_end_nothing() -> None:
    async def scene() -> None:
        pipe = Pipe(pause_s=0.0)
        for number in range(1, 10):
            await pipe.said(b"a")
            assert len(pipe.got) == number
        pipe.reader.close()
        await pipe.said(b"b")
        assert b"b" not in pipe.got
        pipe.close()

    asyncio.run(asyncio.wait_for(scene(), HANG_S))
