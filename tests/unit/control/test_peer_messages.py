"""What a controller does with messages of members, newcomers, and processes whose time is over."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S
from tests.unit.control.test_peers import Lines
from tests.unit.core.test_placement import disaggregated
from yatt.adapters.net.channel import Answer
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.slabs.node_loads import NodeLoads
from yatt.control.membership.liveness import Liveness
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.control.peer_messages import PeerMessages
from yatt.core.gpus.placement import placement_of
from yatt.core.phases import phases
from yatt.errors import EXIT_DO_NOT_RESTART, EXIT_EXCLUDED, EXIT_FAILED, EXIT_USER_MISTAKE
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m
from yatt.records.load import NodeLoad

KNOCK = c.Knock(address="tcp://b")


class Desk:
    """A controller of three nodes, of which node 0 trains and leads."""

    def __init__(self, index: int = 0) -> None:
        config = disaggregated(3, 1, 1)
        paths = RunPaths(Path("/r"))
        node = Node(
            config=config,
            paths=paths,
            placement=placement_of(config),
            attempt=1,
            index=index,
            host="",
            device="cpu",
        )
        self.peers, self.lines, self.inbox = Peers(), Lines(), Inbox()
        self.peers.lines.dial_with(self.lines.dial)
        self.orders: list[tuple[str, m.Message]] = []
        controller: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        controller.set_result(self.carry_out)
        self.messages = PeerMessages(
            node=node, peers=self.peers, liveness=Liveness(node, self.peers, lambda *_: None, NodeLoad),
            to_file=None, sender=None, inbox=self.inbox if index == 0 else None, loads=NodeLoads(NodeLoad),
            controller=controller,
        )  # type: ignore[arg-type] # fmt: skip

    async def carry_out(self, sender: str, body: m.Message) -> m.Message:
        self.orders.append((sender, body))
        return m.Done()

    async def say(self, sender: str, body: m.Message) -> Answer:
        answer = self.messages.handle(sender, body)
        return await answer if isinstance(answer, Awaitable) else answer

    async def events(self) -> list[phases.Event]:
        found = []
        while self.inbox._events:
            found.append(await self.inbox.next())
        return found


def scene(play: Callable[[Desk], Awaitable[None]], index: int = 0) -> None:
    async def run() -> None:
        desk = Desk(index)
        await play(desk)
        await desk.peers.lines.close()

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_knock_is_heard_once_and_only_of_engine_nodes() -> None:
    async def play(desk: Desk) -> None:
        assert await desk.say("node2.2", KNOCK) == m.Done()
        assert await desk.say("node2.2", KNOCK) == m.Done(), "it came twice"
        assert await desk.events() == [phases.NodeKnocked(2, 2)]
        assert isinstance(await desk.say("node0.2", KNOCK), m.Failed), "a trainer node"
        assert isinstance(await desk.say("node7.2", KNOCK), m.Failed), "no node of the run"
        desk.peers.exclude(2, "gave up", 2)
        assert isinstance(await desk.say("node2.2", KNOCK), m.Failed), "its time is over"
        assert await desk.events() == []

    scene(play)


def test_only_the_leader_hears_a_knock() -> None:
    async def play(desk: Desk) -> None:
        assert isinstance(await desk.say("node2.2", KNOCK), m.Failed)

    scene(play, index=1)


def test_a_newcomer_may_say_that_it_lives_and_fails_and_nothing_else() -> None:
    async def play(desk: Desk) -> None:
        await desk.say("node2.2", KNOCK)
        await desk.events()
        assert await desk.say("node2.2", c.Alive()) is None
        assert isinstance(
            await desk.say("node2.2", c.EngineRoom(role="rollout", room=4, version=1)), m.Failed
        )
        assert desk.orders == []
        report = c.FailureReport(error="no folder", exit_code=EXIT_USER_MISTAKE)
        assert await desk.say("node2.2", report) == m.Done()
        assert await desk.events() == [phases.NodeLost(2, "gave up: no folder", 2)], "it costs nothing else"

    scene(play)


@pytest.mark.parametrize(
    ("life", "exit_code", "is_loss"),
    [
        (1, EXIT_FAILED, True), (1, EXIT_USER_MISTAKE, False), (2, EXIT_USER_MISTAKE, True),
        (2, EXIT_DO_NOT_RESTART, False),
    ],
)  # fmt: skip
def test_a_mistake_that_only_a_later_life_finds_is_its_own(life: int, exit_code: int, is_loss: bool) -> None:
    async def play(desk: Desk) -> None:
        sender = "node2" if life == 1 else "node2.2"
        if life == 2:
            desk.peers.admit(2, 2, "tcp://b")
        await desk.say(sender, c.FailureReport(error="no folder", exit_code=exit_code))
        (event,) = await desk.events()
        assert isinstance(event, phases.NodeLost) == is_loss

    scene(play)


def test_a_peer_of_an_unknown_attempt_asks_again_and_one_of_a_finished_attempt_ends() -> None:
    async def play(desk: Desk) -> None:
        room = c.EngineRoom(role="rollout", room=4, version=1)
        assert isinstance(await desk.say("node2.2", room), m.Failed), "at once, not never"
        assert await desk.say("node2.2", c.Alive()) is None
        assert "node2.2" not in desk.lines, "it is not told to end"
        desk.peers.exclude(2, "is gone")
        assert await desk.say("node2", c.Alive()) is None
        (told,) = desk.lines["node2"].told
        assert isinstance(told, c.Quit) and told.exit_code == EXIT_EXCLUDED
        assert await desk.say("node2", room) is None, "late answers of the lost are not heard"

    scene(play)


def test_a_newcomer_is_watched_from_its_knock_on() -> None:
    async def play(desk: Desk) -> None:
        desk.peers.exclude(2, "is gone")
        liveness = desk.messages.liveness
        liveness._watched = replace(liveness._watched, silences={1: 0.0, 2: 99.0}, lost=frozenset({2}))
        await desk.say("node2.2", KNOCK)
        assert liveness._watched.silences[2] == 0.0
        assert liveness._watched.lost == frozenset()
        assert desk.peers.newest_life(2) == 2

    scene(play)
