"""Who takes part: members, newcomers, and processes whose time is over."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.runs import HANG_S
from yatt.control.membership.peers import Peers, Standing
from yatt.errors import WorkerFailed
from yatt.records import cluster as c, message as m
from yatt.records.codec import encode_body


class Line:
    """A connection whose answers never come."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address, self.is_closed = name, address, False
        self.waiting: list[asyncio.Future[m.Message]] = []
        self.told: list[m.Message | msgspec.Raw] = []

    async def request(self, to: str, body: m.Message, deadline_s: float, watch: Any) -> m.Message:
        assert to == self.name
        self.waiting.append(asyncio.get_running_loop().create_future())
        return await self.waiting[-1]

    def send(self, to: str, body: m.Message | msgspec.Raw) -> None:
        assert to == self.name
        self.told.append(body)

    def fail_waiting(self, to: str, error: Exception) -> None:
        for each in self.waiting:
            if not each.done():
                each.set_exception(error)

    async def failure(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.is_closed = True


class Lines(dict[str, Line]):
    def dial(self, name: str, address: str) -> Any:
        self[name] = Line(name, address)
        return self[name]


def scene(play: Callable[[Peers, Lines], Awaitable[None]]) -> None:
    async def run() -> None:
        peers, lines = Peers(), Lines()
        peers.lines.dial_with(lines.dial)
        await play(peers, lines)
        await peers.lines.close()

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_standings_follow_a_node_from_its_loss_to_its_return() -> None:
    async def play(peers: Peers, _: Lines) -> None:
        assert peers.standing(3, 1) is Standing.MEMBER
        assert peers.standing(3, 2) is Standing.UNKNOWN
        peers.exclude(3, "is gone")
        assert peers.standing(3, 1) is Standing.OVER
        peers.invite(3, 2, "tcp://b")
        assert (peers.standing(3, 1), peers.standing(3, 2)) == (Standing.OVER, Standing.NEWCOMER)
        assert 3 in peers.lost
        peers.admit(3, 2, "tcp://b")
        assert (peers.standing(3, 1), peers.standing(3, 2)) == (Standing.OVER, Standing.MEMBER)
        assert 3 not in peers.lost
        peers.exclude(3, "is gone", life=1)
        assert peers.standing(3, 2) is Standing.MEMBER, "that was about the former process"
        peers.exclude(3, "is gone", life=2)
        assert peers.standing(3, 2) is Standing.OVER

    scene(play)


def test_requests_go_to_the_process_that_takes_part_and_fail_with_it() -> None:
    async def play(peers: Peers, lines: Lines) -> None:
        first = asyncio.ensure_future(peers.request(3, c.StartWorkers(), 60))
        await asyncio.sleep(0)
        peers.exclude(3, "is gone")
        with pytest.raises(WorkerFailed, match="node3 is gone"):
            await first
        with pytest.raises(WorkerFailed, match="node3 is gone"):
            await peers.request(3, c.StartWorkers(), 60)
        peers.invite(3, 2, "tcp://b")
        with pytest.raises(WorkerFailed, match="node3 is gone"):
            await peers.request(3, c.StartWorkers(), 60)
        started = asyncio.ensure_future(peers.request_newcomer(3, 2, c.StartWorkers(), 60))
        await asyncio.sleep(0)
        assert lines["node3.2"].address == "tcp://b"
        peers.admit(3, 2, "tcp://b")
        await asyncio.sleep(0)
        assert lines["node3"].is_closed and not started.done()
        asked = asyncio.ensure_future(peers.request(3, c.StatusQuery(), 60))
        await asyncio.sleep(0)
        assert len(lines["node3.2"].waiting) == 2
        peers.exclude(3, "is gone again", life=2)
        for each in (started, asked):
            with pytest.raises(WorkerFailed, match=r"node3\.2 is gone again"):
                await each

    scene(play)


def test_a_newcomer_that_is_lost_or_replaced_leaves_the_node_as_it_was() -> None:
    async def play(peers: Peers, lines: Lines) -> None:
        lost: list[int] = []
        peers.subscribe(lost=lost.append)
        peers.exclude(3, "is gone")
        peers.invite(3, 2, "tcp://b")
        second = asyncio.ensure_future(peers.request_newcomer(3, 2, c.StartWorkers(), 60))
        await asyncio.sleep(0)
        peers.invite(3, 3, "tcp://c")
        with pytest.raises(WorkerFailed):
            await second
        with pytest.raises(WorkerFailed, match="is over"):
            await peers.request_newcomer(3, 2, c.StartWorkers(), 60)
        peers.exclude(3, "gave up", life=3)
        assert lost == [3], "the node was lost before"
        assert not peers.newcomers and 3 in peers.lost
        await peers.tell(3, c.Alive())
        assert lines["node3"].told, "the process that took part last, which may only have been suspended"
        await peers.tell(3, c.Alive(), life=3)
        assert "node3.3" not in lines, "none is opened to a process that is over"

    scene(play)


def test_an_early_admission_excludes_the_former_process_and_a_late_one_nothing() -> None:
    async def play(peers: Peers, _: Lines) -> None:
        lost: list[int] = []
        admitted: list[int] = []
        peers.subscribe(lost=lost.append, admitted=admitted.append)
        peers.admit(3, 3, "tcp://c")
        assert (lost, admitted) == ([3], [3])
        peers.admit(3, 2, "tcp://b")
        assert peers.life(3) == 3 and admitted == [3]

    scene(play)


def test_several_are_told_at_once_each_in_its_newest_life() -> None:
    async def play(peers: Peers, lines: Lines) -> None:
        peers.exclude(3, "is gone")
        peers.invite(3, 2, "tcp://b")
        peers.tell_each((2, 3), c.Alive())
        encoded = bytes(encode_body(c.Alive()))
        assert {name: [bytes(each) for each in line.told] for name, line in lines.items()} == {
            "node2": [encoded], "node3.2": [encoded],
        }  # fmt: skip

    scene(play)
