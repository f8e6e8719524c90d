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
from yatt.control.gpus import publications
from yatt.control.gpus.publications import LocalPublication, Publications
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.core.placement import place
from yatt.engine.published import read_publication
from yatt.errors import WorkerFailed, YattError
from yatt.obs.events import EventLog
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m

SIZES = {"model-00001.safetensors": 300_001, "model-00002.safetensors": 70_000}


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
        self.asked: list[c.ReadPublication] = []
        self.peers = [Peers(), Peers()]
        self.stores = [self._store(node) for node in self.nodes]
        self.before_piece = asyncio.Event()
        self.before_piece.set()

    def _store(self, node: Node) -> Publications:
        make_private(node.weights_root)
        events = EventLog(
            attempt=1,
            node=node.index,
            role="controller",
            sink=lambda line: self.events.append(json.loads(line)),
        )
        return Publications(node, self.peers[node.index], events, Progress(int))

    async def answer(self, _: str, body: m.Message) -> m.Message | None:
        source = self.stores[0]
        try:
            match body:
                case c.ListPublication():
                    return await source.list_files(body)
                case c.ReadPublication():
                    self.asked.append(body)
                    await self.before_piece.wait()
                    return await source.read(body)
                case c.DigestPublication():
                    return await source.digest(body)
        except YattError as error:
            return m.Failed(error=str(error), exit_code=error.exit_code)
        return None

    def publish(self, policy_version: int) -> dict[str, bytes]:
        folder = self.nodes[0].weights_folder(policy_version)
        folder.mkdir()
        content = {name: os.urandom(size) for name, size in SIZES.items()}
        index = {"policy_version": policy_version, "files": list(SIZES), "checksums": {}}
        content["index.json"] = json.dumps(index).encode()
        for name, data in content.items():
            (folder / name).write_bytes(data)
        self.stores[0].adopt(
            LocalPublication(policy_version=policy_version, folder=folder, probe=(), expected=())
        )
        return content

    async def fetch(self, policy_version: int) -> None:
        order = c.FetchWeights(
            policy_version=policy_version,
            source=0,
            probe=(b"abcd",),
            probe_logprobs=(b"efgh",),
            rounding=0.25,
        )
        await self.stores[1].fetch(order)

    def received(self, policy_version: int) -> dict[str, bytes]:
        folder = self.nodes[1].weights_folder(policy_version)
        return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


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
    monkeypatch.setattr(publications, "PIECE_BYTES", 4096)


async def until(holds, what: str) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"waited 10 s for {what}")


def test_a_publication_arrives_whole_and_only_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            content = pair.publish(3)
            await pair.fetch(3)
            assert pair.received(3) == content
            newest = pair.stores[1].newest
            assert newest is not None
            assert (newest.policy_version, newest.probe, newest.expected, newest.rounding) == (
                3,
                (b"abcd",),
                (b"efgh",),
                0.25,
            )
            assert read_publication(str(newest.folder), 3).policy_version == 3
            num_asked = len(pair.asked)
            assert num_asked == 74 + 18 + 1
            await pair.fetch(3)
            assert len(pair.asked) == num_asked, "what is here is not fetched again"
            (told,) = [event for event in pair.events if event["kind"] == "weights.fetch"]
            assert (told["source"], told["size_bytes"]) == (0, sum(map(len, content.values())))

    asyncio.run(scene())


def test_the_old_publication_stays_until_the_new_one_is_taken(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            first, second = pair.publish(1), pair.publish(2)
            await pair.fetch(1)
            await pair.fetch(2)
            assert (pair.received(1), pair.received(2)) == (first, second)
            await pair.stores[1].drop_older()
            assert (pair.received(1), pair.received(2)) == ({}, second)

    asyncio.run(scene())


def test_a_fetch_that_is_broken_off_leaves_nothing_an_engine_could_load(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            content = pair.publish(1)
            await pair.fetch(1)
            newer = pair.publish(2)
            pair.asked.clear()
            fetching = asyncio.ensure_future(pair.fetch(2))
            await until(lambda: len(pair.asked) > 20, "some pieces")
            pair.before_piece.clear()
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            assert pair.received(2) == {}
            newest = pair.stores[1].newest
            assert newest is not None
            assert newest.policy_version == 1
            assert pair.received(1) == content, "an engine that starts now takes the old ones, whole"
            pair.before_piece.set()
            await pair.fetch(2)
            assert pair.received(2) == newer

    asyncio.run(scene())


def test_bytes_that_differ_from_the_source_are_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            pair.publish(1)
            asked = c.DigestPublication(policy_version=1, name="model-00002.safetensors")
            await pair.stores[0].digest(asked)  # noted before the file changes
            file = pair.nodes[0].weights_folder(1) / "model-00002.safetensors"
            file.write_bytes(os.urandom(SIZES["model-00002.safetensors"]))
            with pytest.raises(
                WorkerFailed, match=r"model-00002.safetensors of policy version 1 is not what"
            ):
                await pair.fetch(1)
            assert pair.received(1) == {}

    asyncio.run(scene())


def test_a_source_that_is_lost_fails_the_fetch_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            pair.publish(1)
            pair.before_piece.clear()
            fetching = asyncio.ensure_future(pair.fetch(1))
            await until(lambda: pair.asked, "the first request")
            pair.peers[1].exclude(0, "was not heard of for 10.0 s")
            with pytest.raises(WorkerFailed, match=r"node0 was not heard of for 10\.0 s"):
                await asyncio.wait_for(fetching, 2.0)
            assert pair.received(1) == {}

    asyncio.run(scene())


@pytest.mark.parametrize("name", ["../keys/server.key_secret", "/etc/passwd", "model-00009.safetensors"])
def test_only_published_files_can_be_read(tmp_path: Path, name: str) -> None:
    async def scene() -> None:
        async with connected(tmp_path) as pair:
            pair.publish(1)
            with pytest.raises(WorkerFailed):
                await pair.stores[0].read(
                    c.ReadPublication(policy_version=1, name=name, offset=0, num_bytes=10)
                )

    asyncio.run(scene())
