"""How controllers find each other: by few files, few lines, and with the missing named."""

import asyncio
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.unit.core.test_placement import disaggregated
from yatt.adapters.net.curve import make_keys
from yatt.control.membership import rendezvous
from yatt.control.membership.peers import Peers
from yatt.control.membership.rendezvous import meet_peers
from yatt.control.node import Node
from yatt.core.gpus.placement import placement_of
from yatt.errors import DeadlineExceeded
from yatt.paths import RunPaths
from yatt.records import message as m

LIMIT_S = 60


def nodes_in(root: Path, num: int, start_timeout_s: float = LIMIT_S) -> list[Node]:
    config = disaggregated(num, 1, 1)
    config = replace(config, launch=replace(config.launch, start_timeout_s=start_timeout_s))
    placement = placement_of(config)
    root.mkdir(exist_ok=True)
    make_keys(root / "keys")
    return [
        Node(
            config=config, paths=RunPaths(root), placement=placement, attempt=1, index=index,
            host="127.0.0.1", device="cpu",
        )
        for index in range(num)
    ]  # fmt: skip


async def answer(sender: str, body: m.Message) -> m.Message | None:
    return m.Done()


async def met(nodes: list[Node], counts: "Counter[str]") -> None:
    """All of them meet in one event loop; then each non-leader asks the leader something."""
    context = zmq.Context()
    found = await asyncio.gather(*(meet_peers(node, context, answer, lambda: 0) for node in nodes))
    counts["lines after the meeting"] = counts["lines"]
    peers = []
    for each in found:
        peers.append(Peers())
        peers[-1].lines.dial_with(each.dial)
    answers = await asyncio.gather(*(each.request(0, m.Stop(), LIMIT_S) for each in peers[1:]))
    assert answers == [m.Done()] * len(peers[1:])
    for meeting, each in zip(found, peers, strict=True):
        await each.lines.close()
        await meeting.channel.close()
    context.term()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> "Counter[str]":
    """Files opened and lines made, counted."""
    counted: Counter[str] = Counter()
    for name, what in (("read_or_none", "files"), ("calling_socket", "lines")):
        real = getattr(rendezvous, name)

        def counting(*arguments: object, real=real, what: str = what) -> object:
            counted[what] += 1
            return real(*arguments)

        monkeypatch.setattr(rendezvous, name, counting)
    return counted


def test_files_and_lines_grow_with_the_nodes_and_not_with_their_pairs(tmp_path: Path, counts) -> None:
    made = {}
    for num in (6, 12, 24):
        counts.clear()
        asyncio.run(met(nodes_in(tmp_path / f"{num}", num), counts))
        made[num] = dict(counts)
        assert counts["lines after the meeting"] == 0, "a line is opened where it is used"
        assert counts["lines"] == num - 1
    # Each node's own file once, and the leader's file at each of a few looks of every other node.
    assert all(made[num]["files"] <= 8 * num for num in made), made


def test_who_is_missing_is_named_by_the_leader_and_by_the_others(tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path, 4, start_timeout_s=0.6)

    async def three_of_four() -> list[BaseException]:
        context = zmq.Context()
        met = (meet_peers(node, context, answer, lambda: 0) for node in nodes[:3])
        ended = await asyncio.gather(*met, return_exceptions=True)
        context.term()
        return ended

    for error in asyncio.run(three_of_four()):
        assert isinstance(error, DeadlineExceeded)
        assert re.search(r"have not published themselves: node3\.", str(error))


def test_a_node_that_no_listing_shows_is_found_by_its_name(tmp_path: Path, monkeypatch) -> None:
    """As on a shared filesystem whose clients cache folders."""
    monkeypatch.setattr(rendezvous, "published_nodes", lambda node: set())
    asyncio.run(met(nodes_in(tmp_path, 3), Counter()))
