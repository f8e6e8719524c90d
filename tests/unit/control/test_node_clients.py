"""What the leader tells nodes about one that leaves or joins."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S
from tests.unit.core.test_placement import disaggregated
from yatt.control.leader.node_clients import NodeClients
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.core.gpus.placement import placement_of
from yatt.errors import EXIT_EXCLUDED, EXIT_FAILED, EXIT_USER_MISTAKE, WorkerFailed
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m


class Told(Peers):
    """Peers that note what each process is told and asked; each request fails with `failure`, if set."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int, m.Message]] = []
        self.failure: WorkerFailed | None = None
        self.meanwhile: Callable[[], None] = lambda: None

    async def tell(self, index: int, body: m.Message, life: int = 0) -> None:
        self.told.append((index, life or self.newest_life(index), body))

    async def request(self, index: int, body: Any, deadline_s: float, moved: Any = None) -> Any:
        self.told.append((index, self.life(index), body))
        self.meanwhile()
        if self.failure is not None:
            raise self.failure
        return m.Done()


class Leader:
    def __init__(self) -> None:
        config = disaggregated(4, 1, 1)
        node = Node(
            config=config, paths=RunPaths(Path("/r")), placement=placement_of(config),
            attempt=1, index=0, host="",
            device="cpu",
        )  # fmt: skip
        self.peers, self.given_up = Told(), list[tuple[int, int, str]]()

        async def own(_: str, __: m.Message) -> m.Message:
            return m.Done()

        self.clients = NodeClients(node, own, self.peers, lambda *what: self.given_up.append(what), lambda: 0)

    def who(self, kind: type[m.Message]) -> list[tuple[int, int]]:
        return [(index, life) for index, life, body in self.peers.told if isinstance(body, kind)]


def scene(play: Callable[[Leader], Awaitable[None]]) -> None:
    async def run() -> None:
        await play(Leader())

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_the_loss_of_a_process_that_takes_part_is_told_to_all_though_the_next_one_knocks_already() -> None:
    async def play(leader: Leader) -> None:
        leader.peers.invite(2, 2, "tcp://b")  # the knock came before the loss was noticed
        await leader.clients.exclude(2, 1, "ended, and was started again")
        assert leader.who(c.PeerLost) == [(1, 1), (3, 1)]
        assert [(i, n) for i, n, body in leader.peers.told if isinstance(body, c.Quit)] == [(2, 1)]
        assert leader.clients.is_lost(2)

    scene(play)


def test_the_loss_of_a_newcomer_concerns_nobody_else() -> None:
    async def play(leader: Leader) -> None:
        leader.peers.exclude(2, "is gone")
        leader.peers.invite(2, 2, "tcp://b")
        await leader.clients.exclude(2, 2, "gave up")
        assert leader.who(c.PeerLost) == []
        (quit_order,) = [body for _, _, body in leader.peers.told if isinstance(body, c.Quit)]
        assert quit_order.exit_code == EXIT_EXCLUDED

    scene(play)


def test_who_is_admitted_is_introduced_to_all_and_hears_what_has_changed() -> None:
    async def play(leader: Leader) -> None:
        for index in (2, 3):
            leader.peers.exclude(index, "is gone")
        leader.peers.invite(2, 2, "tcp://b")
        leader.clients.admit(2, 2)
        await leader.clients.introduce(2, 2)
        joined = c.PeerJoined(node=2, life=2, address="tcp://b")
        assert [(i, body) for i, _, body in leader.peers.told] == [
            (2, c.Roster(lost=(3,), joined=(joined,))), (1, joined),
        ]  # fmt: skip
        leader.peers.exclude(2, "is gone", 2)
        leader.peers.told.clear()
        await leader.clients.introduce(2, 2)
        assert leader.peers.told == [], "it is lost again"

    scene(play)


def test_newcomers_are_told_that_the_run_ends() -> None:
    async def play(leader: Leader) -> None:
        leader.peers.exclude(2, "is gone")
        leader.peers.invite(2, 2, "tcp://b")
        await leader.clients.quit("finished", 0, 1.0)
        assert sorted(leader.who(c.Quit)) == [(1, 1), (2, 2), (3, 1)]

    scene(play)


@pytest.mark.parametrize(
    ("life", "code", "gives_up"),
    [(1, EXIT_FAILED, True), (1, EXIT_USER_MISTAKE, False), (2, EXIT_USER_MISTAKE, True)],
)
def test_a_node_that_fails_at_an_order_is_lost_by_its_life(life: int, code: int, *, gives_up: bool) -> None:
    async def play(leader: Leader) -> None:
        if life > 1:
            leader.peers.admit(2, life, "tcp://b")
        leader.peers.failure = WorkerFailed("no")
        leader.peers.failure.exit_code = code
        if gives_up:
            assert await leader.clients.ask_if_there(2, c.SyncWeights()) is None
        else:
            with pytest.raises(WorkerFailed):
                await leader.clients.ask_if_there(2, c.SyncWeights())
        assert leader.given_up == ([(2, life, "no")] if gives_up else [])

    scene(play)


def test_a_failure_of_a_process_that_was_replaced_meanwhile_costs_the_next_one_nothing() -> None:
    async def play(leader: Leader) -> None:
        leader.peers.failure = WorkerFailed("node2 is gone")
        leader.peers.meanwhile = lambda: leader.peers.admit(2, 2, "tcp://b")
        assert await leader.clients.ask_if_there(2, c.SyncWeights()) is None
        assert leader.given_up == []

    scene(play)
