"""A descriptor is read at once after a pause, and not for every message while many come."""

import asyncio
import os

from tests.runs import HANG_S
from yatt.adapters.paced_reader import PacedReader


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


def test_the_first_is_read_at_once_and_the_next_ones_together() -> None:
    async def scene() -> None:
        pipe = Pipe(pause_s=0.2)
        await pipe.said(b"a")
        assert pipe.got == b"a"
        for _ in range(50):
            await pipe.said(b"b")
        assert (pipe.got, pipe.num_looks) == (b"a", 1)
        while len(pipe.got) < 51:
            await asyncio.sleep(0.01)
        assert pipe.num_looks == 2
        await asyncio.sleep(0.5)
        num_idle = pipe.num_looks
        assert num_idle == 3, "it found nothing"
        await asyncio.sleep(0.3)
        assert pipe.num_looks == num_idle, "nothing wakes it"
        await pipe.said(b"c")
        assert pipe.got.endswith(b"c"), "at once again"
        pipe.close()

    asyncio.run(asyncio.wait_for(scene(), HANG_S))


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
