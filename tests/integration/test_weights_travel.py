"""Weights go from a trainer node to engine nodes, and from one of these to the next: whole, or not at all."""

import asyncio
import contextlib
import json
import os
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.runs import HANG_S, turns, until
from tests.unit.core.test_placement import disaggregated
from yatt.adapters.files.files import make_private
from yatt.adapters.net import bulk
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import calling_socket, listening_socket, make_keys
from yatt.adapters.node_local.host_segment import (
    SegmentReader,
    SegmentWriter,
    Stamp,
    segment_path,
    weight_plan_path,
)
from yatt.config.schema import RunConfig
from yatt.control.gpus.weights import weight_segments
from yatt.control.gpus.weights.fill import Fill
from yatt.control.gpus.weights.former_weights import OwnWeights
from yatt.control.gpus.weights.publications import Publications
from yatt.control.gpus.weights.uploads import host_stem
from yatt.control.gpus.weights.weight_segments import GivenWeights
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.core.gpus.placement import placement_of
from yatt.engine.weights.published import read_publication
from yatt.errors import WorkerFailed, YattError
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m

SIZE, PLAN, BLOCK = 370_002, b"what rank 0 has", 4096
BLOCKS = -(-SIZE // BLOCK)


class Member:
    """One node's part of it."""

    def __init__(self, folder: Path, index: int, config: RunConfig) -> None:
        launch = replace(config.launch, scratch_dir=str(folder), shm_dir=str(folder / f"shm{index}"))
        config = replace(config, launch=launch)
        self.node = Node(
            config=config, paths=RunPaths(folder), placement=placement_of(config), attempt=1, index=index,
            host="127.0.0.1", device="cpu",
        )  # fmt: skip
        make_private(self.node.weights_root)
        self.events: list[dict] = []
        log = EventLog(
            attempt=1, node=index, role="controller", sink=lambda line: self.events.append(json.loads(line))
        )
        self.peers = Peers()
        self.taken = Publications(self.node, self.peers, log, Progress(int))
        self.given = GivenWeights(self.node, self.taken.fetched)

    async def answer(self, _: str, body: m.Message) -> m.Message | None:
        try:
            match body:
                case c.DescribeWeights():
                    return await self.given.describe(body)
                case c.OfferWeights():
                    return await self.given.offer(body)
        except YattError as error:
            return m.Failed(error=str(error), exit_code=error.exit_code)
        return None

    async def take(self, policy_version: int, part_sums: dict[str, tuple[int, ...]] | None = None) -> None:
        order = c.TakeWeights(
            policy_version=policy_version, probe=(b"abcd",), probe_logprobs=(b"efgh",), rounding=0.25,
            sums={"norm": 7}, part_sums=part_sums or {},
        )  # fmt: skip
        await self.taken.take(order)

    def received(self, policy_version: int) -> bytes:
        """What an engine of this node would read.

        Raises:
            WorkerFailed: there is nothing of this version.
        """
        publication = read_publication(str(self.node.weights_folder(policy_version)), policy_version)
        (stem,) = publication.stems
        assert (publication.sums, weight_plan_path(stem).read_bytes()) == ({"norm": 7}, PLAN)
        reader = SegmentReader(segment_path(stem, "weights"))
        reader.check(publication.stamp)
        return bytes(reader.data)

    def told(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["kind"] == kind]


class Cluster:
    """A trainer node (node 0) and engine nodes, each with lines to the others over CURVE TCP."""

    def __init__(self, folder: Path, engine_nodes: int) -> None:
        config = disaggregated(1 + engine_nodes, 1, 1)
        self.members = [Member(folder, index, config) for index in range(1 + engine_nodes)]
        stem = host_stem(self.members[0].node, 0)
        self.chance = np.random.default_rng(len(str(folder)))
        self.segment = SegmentWriter(segment_path(stem, "weights"), SIZE)
        self.segment.data[:] = os.urandom(SIZE)
        weight_plan_path(stem).write_bytes(PLAN)

    def publish(self, policy_version: int, share: float = 1.0) -> bytes:
        """Gives this share of the 16-bit words other values."""
        self.segment.invalidate()
        words = np.frombuffer(self.segment.data[: SIZE - SIZE % 2], np.uint16)
        places = np.flatnonzero(self.chance.random(len(words)) < share)
        words[places] += self.chance.integers(1, 1 << 16, len(places), np.uint16)
        self.segment.complete(Stamp(1, policy_version))
        return bytes(self.segment.data)

    async def take(self, policy_version: int) -> None:
        await asyncio.gather(*(member.take(policy_version) for member in self.members[1:]))


@contextlib.asynccontextmanager
async def connected(folder: Path, engine_nodes: int = 1) -> AsyncIterator[Cluster]:
    cluster = Cluster(folder, engine_nodes)
    async with lines_between(cluster.members, folder):
        yield cluster


@contextlib.asynccontextmanager
async def lines_between(members: list[Member], folder: Path) -> AsyncIterator[None]:
    keys, context = make_keys(folder / "keys"), zmq.Context()
    channels = []
    addresses = []
    for member in members:
        socket = listening_socket(context, "tcp://127.0.0.1:*", keys)
        channels.append(Channel(socket, attempt=1, handler=member.answer))
        addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    for member in members:
        for other, address in enumerate(addresses):
            if other != member.node.index:
                socket = calling_socket(context, address, f"node{member.node.index}", keys)
                line = Channel(socket, attempt=1, handler=member.answer, peer=f"node{other}")
                member.peers.lines.open[f"node{other}"] = line
                channels.append(line)
    try:
        yield
    finally:
        for member in members:
            member.given.close()
        await asyncio.gather(*(channel.close() for channel in channels))
        context.destroy(linger=0)


class Sent:
    """Counts the blocks that are sent, by kind of source; holds all after `limit` until `opened`."""

    def __init__(self) -> None:
        self.num: Counter[str] = Counter()
        self.limit, self.opened = 10**9, threading.Event()

    def note(self, kind: str) -> None:
        self.num[kind] += 1
        if self.num[kind] > self.limit:
            assert self.opened.wait(HANG_S)


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Small blocks, counted."""
    counts = Sent()
    for kind in (OwnWeights, Fill):

        def block(self, begin, end, kind=kind, original=kind.block):
            counts.note("owner" if kind is not Fill else "relay")
            return original(self, begin, end)

        monkeypatch.setattr(kind, "block", block)
    monkeypatch.setattr(bulk, "BLOCK_BYTES", BLOCK)
    for name in ("MEET_S", "ANSWER_S"):  # nodes that answer have time
        monkeypatch.setattr(weight_segments, name, HANG_S)
    return counts


def test_weights_arrive_whole_and_only_once(tmp_path: Path, sent: Sent) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as cluster:
            taker = cluster.members[1]
            content = cluster.publish(3)
            await taker.take(3)
            assert taker.received(3) == content
            newest = taker.taken.newest
            assert newest is not None
            told = (newest.policy_version, newest.probe, newest.expected, newest.rounding)
            assert told == (3, (b"abcd",), (b"efgh",), 0.25)
            assert sent.num == {"owner": BLOCKS}
            await taker.take(3)
            assert sent.num == {"owner": BLOCKS}, "what is here is not fetched again"
            (event,) = taker.told("weights.fetch")
            assert (event["ranks"], event["sources"], event["size_bytes"]) == ([0], [0], SIZE)

    asyncio.run(scene())


def test_the_next_version_takes_the_memory_and_the_name_of_the_one_before(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as cluster:
            taker = cluster.members[1]
            cluster.publish(1)
            await taker.take(1)
            before = sorted(path.name for path in taker.node.weights_root.iterdir())
            second = cluster.publish(2)
            await taker.take(2)
            assert taker.received(2) == second
            with pytest.raises(WorkerFailed, match="no weights of policy version 1"):
                taker.received(1)
            after = sorted(path.name for path in taker.node.weights_root.iterdir())
            assert len(after) == len(before) == 3, "a plan, a segment, an index"

    asyncio.run(scene())


def test_while_a_version_arrives_no_engine_can_load_any(tmp_path: Path, sent: Sent) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as cluster:
            taker = cluster.members[1]
            cluster.publish(1)
            await taker.take(1)
            old = taker.taken.newest
            second = cluster.publish(2)
            sent.limit = BLOCKS + 20
            taking = asyncio.ensure_future(taker.take(2))
            await until(lambda: sent.num["owner"] > BLOCKS + 20, "some blocks")
            with pytest.raises(WorkerFailed, match="is being changed; version 1 of attempt 1 was asked for"):
                taker.received(1)
            waiting = asyncio.ensure_future(taker.taken.newer_than(old))
            await turns()
            assert not waiting.done(), "an engine that was refused waits for the next version"
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            with pytest.raises(WorkerFailed):
                taker.received(2)
            sent.limit = 10**9
            retaken = asyncio.ensure_future(taker.take(2))
            await asyncio.sleep(0.05)
            sent.opened.set()  # the threads of the first fetch go on, and change nothing
            await retaken
            assert taker.received(2) == second
            assert await waiting is taker.taken.newest

    asyncio.run(scene())


def test_a_source_that_changes_its_weights_meanwhile_is_found_out(tmp_path: Path, sent: Sent) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as cluster:
            taker = cluster.members[1]
            cluster.publish(1)
            sent.limit = 20
            taking = asyncio.ensure_future(taker.take(1))
            await until(lambda: sent.num["owner"] > 20, "some blocks")
            cluster.publish(2)
            sent.opened.set()
            with pytest.raises(WorkerFailed, match="is version 2 of attempt 1; version 1 of attempt 1"):
                await asyncio.wait_for(taking, HANG_S)
            with pytest.raises(WorkerFailed):
                taker.received(1)

    asyncio.run(scene())


def test_a_lost_or_unknown_source_fails_the_fetch_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_segments, "MEET_S", 0.1)  # nobody comes

    async def scene() -> None:
        async with connected(tmp_path) as cluster:
            taker = cluster.members[1]
            with pytest.raises(WorkerFailed, match="attempt 1 was asked for"):
                await taker.take(1)
            with pytest.raises(WorkerFailed, match="trainer rank-00000 has no host copy here"):
                await taker.given.describe(c.DescribeWeights(rank=0))
            with pytest.raises(WorkerFailed, match="does not fetch version 2 of trainer rank 0"):
                await taker.given.offer(c.OfferWeights(rank=0, policy_version=2, former_version=0))
            taker.peers.exclude(0, "was not heard of for 10.0 s")
            with pytest.raises(WorkerFailed, match=r"node0 was not heard of for 10\.0 s"):
                await asyncio.wait_for(taker.take(1), HANG_S)

    asyncio.run(scene())


def test_a_chain_of_nodes_costs_the_trainer_node_one_transfer(tmp_path: Path, sent: Sent) -> None:
    async def scene() -> None:
        async with connected(tmp_path, engine_nodes=4) as cluster:
            for version in (1, 2):
                content = cluster.publish(version)
                await cluster.take(version)
                assert all(member.received(version) == content for member in cluster.members[1:])
            assert sent.num == {"owner": 2 * BLOCKS, "relay": 3 * 2 * BLOCKS}
            sources = [member.told("weights.fetch")[1]["sources"] for member in cluster.members[1:]]
            assert sources == [[0], [1], [2], [3]]

    asyncio.run(scene())


def test_blocks_are_passed_on_before_the_last_has_come(tmp_path: Path, sent: Sent) -> None:
    async def scene() -> None:
        async with connected(tmp_path, engine_nodes=2) as cluster:
            content = cluster.publish(1)
            sent.limit = BLOCKS // 2
            taking = asyncio.ensure_future(cluster.take(1))
            await until(lambda: sent.num["relay"] > BLOCKS // 3, "blocks from node 1 to node 2")
            assert not taking.done()
            sent.limit = 10**9
            sent.opened.set()
            await taking
            assert cluster.members[2].received(1) == content

    asyncio.run(scene())


@pytest.mark.parametrize("how", ["its server ends", "it begins another version", "it is lost"])
def test_what_the_node_before_does_not_give_comes_from_the_owner(
    tmp_path: Path, sent: Sent, how: str
) -> None:
    async def scene() -> None:
        async with connected(tmp_path, engine_nodes=2) as cluster:
            _, first, second = cluster.members
            content = cluster.publish(1)
            if how == "it is lost":
                second.peers.exclude(1, "was not heard of")
                await second.take(1)
                assert sent.num == {"owner": BLOCKS}
            else:
                sent.limit = BLOCKS // 2
                taking = [asyncio.ensure_future(member.take(1)) for member in (first, second)]
                await until(lambda: sent.num["relay"] > BLOCKS // 4, "blocks from node 1 to node 2")
                if how == "its server ends":
                    first.given.close()
                else:
                    fetched = first.taken.fetched(0)
                    assert fetched is not None and fetched._fill is not None
                    fetched._fill.end()
                sent.limit = 10**9
                sent.opened.set()
                await taking[1]
                await asyncio.gather(taking[0], return_exceptions=True)
                failed = second.told("weights.fetch.fail")
                assert {(each["rank"], each["source"]) for each in failed} == {(0, 1)}
                assert len(failed) == 2, "it is tried twice"
                assert sent.num["owner"] < 2 * BLOCKS, "only what was missing"
            assert second.received(1) == content
            assert second.told("weights.fetch")[0]["sources"] == [0]

    asyncio.run(scene())


def test_a_node_that_does_not_answer_costs_those_behind_it_seconds(tmp_path: Path, monkeypatch) -> None:
    for name in ("MEET_S", "ANSWER_S"):
        monkeypatch.setattr(weight_segments, name, 1.0)

    async def scene() -> None:
        async with connected(tmp_path, engine_nodes=3) as cluster:
            content = cluster.publish(1)

            async def never(_: c.OfferWeights) -> m.Message:
                await asyncio.sleep(3600)
                raise AssertionError

            cluster.members[1].given.offer = never  # type: ignore[method-assign]
            others = cluster.members[2:]
            await asyncio.wait_for(asyncio.gather(*(member.take(1) for member in others)), HANG_S)
            assert all(member.received(1) == content for member in others)
            assert [each["source"] for each in others[0].told("weights.fetch.fail")] == [1, 1]
            assert others[1].told("weights.fetch")[0]["sources"] == [2], "it is fed by the node before it"

    asyncio.run(scene())


def test_a_connection_to_the_owner_that_breaks_is_made_again(tmp_path: Path, monkeypatch) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as cluster:
            taker, content = cluster.members[1], cluster.publish(1)
            receive, broken = bulk.receive_bytes, [3]

            def breaks(ticket: bulk.Ticket, begin: int, end: int, target: bulk.BlockTarget) -> None:
                if broken[0]:
                    broken[0] -= 1
                    raise TimeoutError("timed out")
                receive(ticket, begin, end, target)

            monkeypatch.setattr(bulk, "receive_bytes", breaks)
            monkeypatch.setattr(weight_segments, "PAUSE_S", 0.01)
            await taker.take(1)
            assert taker.received(1) == content
            assert "timed out" in taker.told("weights.fetch.fail")[0]["error"]
            broken[0] = 10**9
            cluster.publish(2)
            with pytest.raises(WorkerFailed, match=r"the transfer from node0 \(127.0.0.1 port \d+\) failed"):
                await taker.take(2)

    asyncio.run(scene())


def test_the_owner_is_tried_again_while_blocks_arrive_and_not_for_ever(tmp_path: Path, monkeypatch) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as cluster:
            taker, content = cluster.members[1], cluster.publish(1)
            receive = bulk.receive_bytes

            def breaks(ticket: bulk.Ticket, begin: int, end: int, target: bulk.BlockTarget) -> None:
                """Each connection gives four blocks."""
                near = min(end, begin + 4 * BLOCK)
                receive(ticket, begin, near, target)
                if near < end:
                    raise ConnectionResetError("reset by peer")

            monkeypatch.setattr(bulk, "receive_bytes", breaks)
            monkeypatch.setattr(weight_segments, "PAUSE_S", 0.01)
            await taker.take(1)
            assert taker.received(1) == content
            assert len(taker.told("weights.fetch.fail")) > weight_segments.OWNER_TRIES

    asyncio.run(scene())


def test_a_fetch_that_is_overtaken_sets_no_stamp(tmp_path: Path, sent: Sent) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as cluster:
            taker = cluster.members[1]
            cluster.publish(1)
            await taker.take(1)
            fetched = taker.taken.fetched(0)
            assert fetched is not None
            cluster.publish(2)
            sent.limit = BLOCKS + 20
            older = asyncio.ensure_future(fetched.fetch(2))
            await until(lambda: sent.num["owner"] > BLOCKS + 20, "some blocks")
            newer = asyncio.ensure_future(fetched.fetch(2))
            await asyncio.sleep(0.05)
            sent.limit = 10**9
            sent.opened.set()
            with pytest.raises(WorkerFailed, match="is not fetched any more"):
                await older
            assert (await newer)[0].size_bytes == SIZE

    asyncio.run(scene())


def test_only_changed_weights_travel_between_nodes(tmp_path: Path, sent: Sent) -> None:
    """Along the whole chain; a node that has another version gets all, and the next one changes again."""

    async def scene() -> None:
        async with connected(tmp_path, engine_nodes=3) as cluster:
            nodes = cluster.members[1:]
            cluster.publish(1)
            await cluster.take(1)
            content = cluster.publish(2, 0.02)
            await cluster.take(2)
            assert all(node.received(2) == content for node in nodes)
            for node in nodes:
                first, second = node.told("weights.fetch")
                assert first["received_bytes"] == SIZE
                assert second["size_bytes"] == SIZE and second["received_bytes"] < 0.06 * SIZE
            content = cluster.publish(3, 0.02)
            await asyncio.gather(nodes[0].take(3), nodes[1].take(3))
            content = cluster.publish(4, 0.02)
            await cluster.take(4)
            assert all(node.received(4) == content for node in nodes)
            came = [node.told("weights.fetch")[-1]["received_bytes"] for node in nodes]
            assert came[0] == came[1] < 0.06 * SIZE and came[2] == SIZE, "node 3 has not taken version 3"

    asyncio.run(scene())


def test_without_the_copy_of_the_version_before_all_of_it_travels(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as cluster:
            for member in cluster.members:
                placement = replace(member.node.config.placement, send_changes=False)
                config = replace(member.node.config, placement=placement)
                member.node = replace(member.node, config=config)
                member.given._node = member.node
            for version in (1, 2):
                content = cluster.publish(version, 0.02)
                await cluster.take(version)
                assert cluster.members[1].received(version) == content
            assert [e["received_bytes"] for e in cluster.members[1].told("weights.fetch")] == [SIZE, SIZE]

    asyncio.run(scene())


class Breaking:
    """`bulk.receive` whose connections break, and whose blocks are spoiled, by chance."""

    def __init__(self, seed: int) -> None:
        self.random, self.receive, self.is_on = random.Random(seed), bulk.receive_bytes, True

    def __call__(self, ticket: bulk.Ticket, begin: int, end: int, target: bulk.BlockTarget) -> None:
        fate = self.random.random() if self.is_on else 1.0
        middle = begin + (end - begin) // BLOCK // 2 * BLOCK
        if fate > 0.5 or middle == begin:
            self.receive(ticket, begin, end, target)
            return
        self.receive(ticket, begin, middle, target)
        if fate < 0.2:
            with target.place(middle, min(BLOCK, end - middle)) as place:
                place[:7] = b"garbage"
                raise WorkerFailed("a block is not what was sealed there")
        raise ConnectionResetError("reset by peer")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_breaks_what_arrives_is_what_was_published(tmp_path: Path, monkeypatch, seed: int) -> None:
    monkeypatch.setattr(bulk, "receive_bytes", breaking := Breaking(seed))
    for name in ("PAUSE_S", "MEET_S", "ANSWER_S"):
        monkeypatch.setattr(weight_segments, name, 0.1)
    chance = breaking.random

    async def scene() -> None:
        async with connected(tmp_path, engine_nodes=3) as cluster:
            nodes, arrived = cluster.members[1:], 0
            for version in range(1, 13):
                breaking.is_on = version < 10
                content = cluster.publish(version, chance.choice((0.0, 0.01, 0.05, 0.6)))
                takers = [node for node in nodes if not breaking.is_on or chance.random() < 0.8]
                taking = [asyncio.ensure_future(node.take(version)) for node in takers]
                if breaking.is_on and chance.random() < 0.2:  # the trainer goes on meanwhile
                    await asyncio.sleep(chance.random() * 0.02)
                    content = b""
                    cluster.segment.invalidate()
                outcomes = await asyncio.gather(*taking, return_exceptions=True)
                for node, outcome in zip(takers, outcomes, strict=True):
                    assert outcome is None or isinstance(outcome, YattError), outcome
                    if outcome is None and content:
                        assert node.received(version) == content, f"version {version}, seed {seed}"
                        arrived += 1
            assert all(node.received(12) == content for node in nodes)
            last = [node.told("weights.fetch")[-1] for node in nodes]
            assert arrived >= 9 and all(event["policy_version"] == 12 for event in last)

    asyncio.run(scene())
