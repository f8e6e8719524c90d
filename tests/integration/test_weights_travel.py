"""Weights go from a trainer node's controller to that of an engine node: whole, or not at all."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.unit.core.test_placement import disaggregated
from yatt.adapters.channel import Channel
from yatt.adapters.curve import calling_socket, listening_socket, make_keys
from yatt.adapters.files import make_private
from yatt.adapters.host_segment import SegmentReader, SegmentWriter, Stamp, segment_path, weight_plan_path
from yatt.control.gpus import weight_segments
from yatt.control.gpus.publications import Publications
from yatt.control.gpus.uploads import host_stem
from yatt.control.gpus.weight_segments import GivenWeights
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.core.placement import place
from yatt.engine.published import read_publication
from yatt.errors import WorkerFailed, YattError
from yatt.obs.events import EventLog
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m

SIZE, PLAN = 370_001, b"what rank 0 has"


class Pair:
    """A trainer node (node 0) and an engine node (node 1), each with a line to the other over CURVE TCP."""

    def __init__(self, folder: Path) -> None:
        config = disaggregated(2, 1, 1)
        launch = replace(config.launch, scratch_dir=str(folder), shm_dir=str(folder / "shm"))
        config = replace(config, launch=launch)
        self.nodes = [
            Node(
                config=config, paths=RunPaths(folder), placement=place(config), attempt=1, index=index,
                host="127.0.0.1", device="cpu",
            )
            for index in range(2)
        ]  # fmt: skip
        self.events: list[dict] = []
        self.asked: list[c.ReadWeights] = []
        self.peers = [Peers(), Peers()]
        for node in self.nodes:
            make_private(node.weights_root)
        self.given = GivenWeights(self.nodes[0])
        events = EventLog(
            attempt=1, node=1, role="controller", sink=lambda line: self.events.append(json.loads(line))
        )
        self.taken = Publications(self.nodes[1], self.peers[1], events, Progress(int))
        stem = host_stem(self.nodes[0], 0)
        self.segment = SegmentWriter(segment_path(stem, "weights"), SIZE)
        weight_plan_path(stem).write_bytes(PLAN)
        self.before_piece = asyncio.Event()
        self.before_piece.set()

    async def answer(self, _: str, body: m.Message) -> m.Message | None:
        try:
            match body:
                case c.DescribeWeights():
                    return await self.given.describe(body)
                case c.ReadWeights():
                    self.asked.append(body)
                    await self.before_piece.wait()
                    return await self.given.read(body)
        except YattError as error:
            return m.Failed(error=str(error), exit_code=error.exit_code)
        return None

    def publish(self, policy_version: int) -> bytes:
        self.segment.invalidate()
        self.segment.data[:] = (content := os.urandom(SIZE))
        self.segment.complete(Stamp(1, policy_version))
        return content

    async def take(self, policy_version: int) -> None:
        order = c.TakeWeights(
            policy_version=policy_version,
            probe=(b"abcd",),
            probe_logprobs=(b"efgh",),
            rounding=0.25,
            sums={"norm": 7},
        )
        await self.taken.take(order)

    def received(self, policy_version: int) -> bytes:
        """What an engine of node 1 would read.

        Raises:
            WorkerFailed: there is nothing of this version.
        """
        publication = read_publication(str(self.nodes[1].weights_folder(policy_version)), policy_version)
        (stem,) = publication.stems
        assert (publication.sums, weight_plan_path(stem).read_bytes()) == ({"norm": 7}, PLAN)
        reader = SegmentReader(segment_path(stem, "weights"))
        reader.check(publication.stamp)
        return bytes(reader.data)


@contextlib.asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[Pair]:
    keys, context, pair = make_keys(folder / "keys"), zmq.Context(), Pair(folder)
    socket = listening_socket(context, "tcp://127.0.0.1:*", keys)
    server = Channel(socket, attempt=1, handler=pair.answer)
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    line = Channel(
        calling_socket(context, address, "node1", keys), attempt=1, handler=pair.answer, peer="node0"
    )
    pair.peers[1].lines[0] = line
    try:
        yield pair
    finally:
        await asyncio.gather(line.close(), server.close())
        context.destroy(linger=0)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_segments, "PIECE_BYTES", 4096)


async def until(holds, what: str) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"waited 10 s for {what}")


def test_weights_arrive_whole_and_only_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            content = pair.publish(3)
            await pair.take(3)
            assert pair.received(3) == content
            newest = pair.taken.newest
            assert newest is not None
            told = (newest.policy_version, newest.probe, newest.expected, newest.rounding)
            assert told == (3, (b"abcd",), (b"efgh",), 0.25)
            assert (num_asked := len(pair.asked)) == -(-SIZE // 4096)
            await pair.take(3)
            assert len(pair.asked) == num_asked, "what is here is not fetched again"
            (event,) = [event for event in pair.events if event["kind"] == "weights.fetch"]
            assert (event["ranks"], event["size_bytes"]) == ([0], SIZE)

    asyncio.run(scene())


def test_the_next_version_takes_the_memory_and_the_name_of_the_one_before(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            pair.publish(1)
            await pair.take(1)
            before = sorted(path.name for path in pair.nodes[1].weights_root.iterdir())
            second = pair.publish(2)
            await pair.take(2)
            assert pair.received(2) == second
            with pytest.raises(WorkerFailed, match="no weights of policy version 1"):
                pair.received(1)
            after = sorted(path.name for path in pair.nodes[1].weights_root.iterdir())
            assert len(after) == len(before) == 3, "a plan, a segment, an index"

    asyncio.run(scene())


def test_while_a_version_arrives_no_engine_can_load_any(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            pair.publish(1)
            await pair.take(1)
            old = pair.taken.newest
            second = pair.publish(2)
            pair.asked.clear()
            taking = asyncio.ensure_future(pair.take(2))
            await until(lambda: len(pair.asked) > 20, "some pieces")
            pair.before_piece.clear()
            with pytest.raises(WorkerFailed, match="is being changed; version 1 of attempt 1 was asked for"):
                pair.received(1)
            waiting = asyncio.ensure_future(pair.taken.newer_than(old))
            await asyncio.sleep(0.05)
            assert not waiting.done(), "an engine that was refused waits for the next version"
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            with pytest.raises(WorkerFailed):
                pair.received(2)
            pair.before_piece.set()
            await pair.take(2)
            assert pair.received(2) == second
            assert await waiting is pair.taken.newest

    asyncio.run(scene())


def test_a_source_that_changes_its_weights_meanwhile_is_found_out(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            pair.publish(1)
            pair.before_piece.clear()
            taking = asyncio.ensure_future(pair.take(1))
            await until(lambda: pair.asked, "the first request")
            pair.publish(2)
            pair.before_piece.set()
            with pytest.raises(WorkerFailed, match="is version 2 of attempt 1; version 1 of attempt 1"):
                await asyncio.wait_for(taking, 5.0)
            with pytest.raises(WorkerFailed):
                pair.received(1)

    asyncio.run(scene())


def test_a_source_that_is_lost_fails_the_fetch_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            pair.publish(1)
            pair.before_piece.clear()
            taking = asyncio.ensure_future(pair.take(1))
            await until(lambda: pair.asked, "the first request")
            pair.peers[1].exclude(0, "was not heard of for 10.0 s")
            with pytest.raises(WorkerFailed, match=r"node0 was not heard of for 10\.0 s"):
                await asyncio.wait_for(taking, 2.0)
            with pytest.raises(WorkerFailed):
                pair.received(1)

    asyncio.run(scene())


def test_only_ranks_of_the_node_are_given(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            pair.publish(1)
            with pytest.raises(WorkerFailed, match="trainer rank 7 has no host copy here"):
                await pair.given.describe(c.DescribeWeights(rank=7))
            with pytest.raises(WorkerFailed, match="cannot be opened"):
                await pair.given.read(c.ReadWeights(rank=7, policy_version=1, offset=0, num_bytes=10))

    asyncio.run(scene())
