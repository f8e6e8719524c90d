"""A newcomer's parts before it takes part: no room is told, no weights are there, versions count anew."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S, turns, until
from tests.unit.core.test_placement import disaggregated
from yatt.control.gpus.engines import LocalEngines
from yatt.control.gpus.weights.publications import Publications
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.control.rollouts import rooms
from yatt.control.rollouts.rooms import RoomAnnouncer
from yatt.control.rollouts.router import Router
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m


def node_of(index: int, life: int = 1, genrms: int = 0) -> Node:
    config = disaggregated(3, 1, 1, genrms=genrms, slabs=genrms)
    return Node(
        config=config, paths=RunPaths(Path("/r")), placement=placement_of(config),
        attempt=1, index=index, host="",
        device="cpu", life=life,
    )  # fmt: skip


class Asked(Peers):
    """Peers that note what is asked, and refuse the first `num_refusals` requests."""

    def __init__(self, num_refusals: int = 0) -> None:
        super().__init__()
        self.asked: list[Any] = []
        self.num_refusals = num_refusals

    async def request(self, index: int, body: Any, deadline_s: float, moved: Any = None) -> Any:
        self.asked.append(body)
        if len(self.asked) <= self.num_refusals:
            return m.Failed(error="node1.2 is not known here yet")
        return m.Done()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "AGAIN_S", 0.01)


def test_a_newcomer_reports_its_room_once_it_is_opened_and_until_it_is_heard() -> None:
    async def play() -> None:
        node, peers = node_of(1, life=2), Asked(num_refusals=2)
        engines = LocalEngines(None, node.config)  # type: ignore[arg-type]
        announcer = RoomAnnouncer(node, engines, peers)
        await engines.add("rollout-n1s0.1", ROLLOUT, node.slabs[0], 1)
        await turns()
        assert peers.asked == [], "nobody asks it before it has weights"
        announcer.open("genrm:other")
        assert peers.asked == []
        announcer.open(ROLLOUT)
        await until(lambda: len(peers.asked) == 3, "the third report")
        assert [body.room for body in peers.asked] == [engines.room(ROLLOUT)] * 3
        announcer.open(ROLLOUT)
        await turns()
        assert len(peers.asked) == 3, "it is opened once"

    asyncio.run(play())


def test_a_refused_report_of_one_role_is_sent_again_though_the_room_of_another_has_changed() -> None:
    async def play() -> None:
        node, peers = node_of(1, genrms=1), Asked(num_refusals=1)
        _, judge = sorted(node.placement.pools, reverse=True)
        engines = LocalEngines(None, node.config)  # type: ignore[arg-type]
        RoomAnnouncer(node, engines, peers)
        await engines.add("genrm-n1s0.1", judge, node.slabs[0], 1)
        await engines.add("rollout-n1s0.1", ROLLOUT, node.slabs[0], 2)
        await until(lambda: len(peers.asked) == 3, "the third report")
        assert sorted(body.role for body in peers.asked) == [judge, judge, ROLLOUT]
        assert {body.version for body in peers.asked} == {2}, "what is there when it is sent"

    asyncio.run(play())


def test_a_first_life_reports_its_room_at_once() -> None:
    async def play() -> None:
        node, peers = node_of(1), Asked()
        engines = LocalEngines(None, node.config)  # type: ignore[arg-type]
        RoomAnnouncer(node, engines, peers)
        await engines.add("rollout-n1s0.1", ROLLOUT, node.slabs[0], 1)
        await until(lambda: peers.asked, "a report")
        assert [type(body) for body in peers.asked] == [c.EngineRoom]

    asyncio.run(play())


def test_a_newcomers_engines_wait_for_their_first_weights() -> None:
    async def play() -> None:
        made = [Publications(node_of(1, life), Peers(), None, Progress(int)) for life in (1, 2)]  # type: ignore[arg-type]
        assert await asyncio.wait_for(made[0].newer_than(None), HANG_S) is None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made[1].newer_than(None), 0.1)

    asyncio.run(play())


def test_the_room_of_a_later_life_counts_from_its_first_version() -> None:
    async def play() -> None:
        node, peers = node_of(0), Peers()
        config = replace(node.config, rollout=replace(node.config.rollout, max_retries=0))
        router = Router(node, LocalEngines(None, config), peers, Progress(int))  # type: ignore[arg-type]
        router.room(ROLLOUT, 1, 3, version=9)
        peers.exclude(1, "is gone")
        router.room(ROLLOUT, 1, 3, version=10)
        assert "rollout@1" not in router._dispatch._servers, "what is lost has no room"
        peers.admit(1, 2, "tcp://b")
        assert "rollout@1" not in router._dispatch._servers, "before it says so"
        router.room(ROLLOUT, 1, 5, version=1)
        assert router._dispatch._servers["rollout@1"].room == 5

    asyncio.run(play())
