"""A lost node: what was asked of it fails or is asked elsewhere at once, and it is not asked again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.runs import HANG_S, until
from tests.unit.core.test_placement import disaggregated
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import calling_socket, listening_socket, make_keys
from yatt.control.gpus.engines import LocalEngines
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.control.rollouts.router import Router
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.errors import StaleAttempt, WorkerFailed
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m

WHY = "was not heard of for 10.0 s"


def request(name: str) -> m.SampleRequest:
    return m.SampleRequest(
        request_id=name, prompt_ids=b"", seed=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=1
    )


class Cluster:
    """Node 0's router, and two rollout nodes: node 1 never answers, node 2 at once."""

    def __init__(self, folder: Path) -> None:
        config = disaggregated(3, 1, 1)
        config = replace(config, rollout=replace(config.rollout, max_retries=0))
        node = Node(
            config=config, paths=RunPaths(folder), placement=placement_of(config), attempt=1, index=0,
            host="127.0.0.1", device="cpu",
        )  # fmt: skip
        self.asked: list[tuple[int, str]] = []
        self.peers = Peers()
        self.router = Router(node, LocalEngines(None, config), self.peers, Progress(int))  # type: ignore[arg-type]

    async def answer(self, index: int, body: m.Message) -> m.Message | None:
        if not isinstance(body, c.Forward):
            return None
        self.asked.append((index, body.sample.request_id))
        if index == 1:
            await asyncio.Event().wait()
        completed = m.Completed(
            request_id="x", token_ids=b"", logprobs=b"", finish_reason="stop", policy_version=0
        )
        return c.Forwarded(completed=completed, room=8, version=0, elsewhere=0)

    def lose(self, index: int) -> None:
        self.peers.exclude(index, WHY)


@contextlib.asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Cluster]:
    keys, context, cluster = make_keys(folder / "keys"), zmq.Context(), Cluster(folder)
    channels = []
    for index in (1, 2):
        socket = listening_socket(context, "tcp://127.0.0.1:*", keys)

        async def handler(_: str, body: m.Message, index: int = index) -> m.Message | None:
            return await cluster.answer(index, body)

        server = Channel(socket, attempt=1, handler=handler)
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        calling = calling_socket(context, address, "node0", keys)
        line = Channel(calling, attempt=1, handler=handler, peer=f"node{index}")
        cluster.peers.lines.open[f"node{index}"] = line
        channels += [server, line]
    try:
        yield cluster
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
        context.destroy(linger=0)


async def until_asked(cluster: Cluster, index: int) -> None:
    await until(lambda: any(asked == index for asked, _ in cluster.asked), f"node{index} to be asked")


def test_what_a_lost_node_owed_is_asked_elsewhere_at_once_and_is_no_retry(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(tmp_path) as cluster:
            both = [asyncio.ensure_future(cluster.router.complete(ROLLOUT, request(name))) for name in "ab"]
            await until_asked(cluster, 1)
            owed = next(name for index, name in cluster.asked if index == 1)
            cluster.lose(1)
            completed = await asyncio.wait_for(asyncio.gather(*both), HANG_S)
            assert [each.finish_reason for each in completed] == ["stop", "stop"]
            assert (2, owed) in cluster.asked, "the same request, though max_retries is 0"
            assert len(cluster.asked) == 3
            for name in "cde":
                await asyncio.wait_for(cluster.router.complete(ROLLOUT, request(name)), HANG_S)
            assert [index for index, _ in cluster.asked[3:]] == [2, 2, 2]

    asyncio.run(scene())


def test_without_any_node_of_the_role_a_request_fails_and_names_the_role(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(tmp_path) as cluster:
            for index in (1, 2):
                cluster.lose(index)
            with pytest.raises(WorkerFailed, match="no node is left that can run rollout"):
                await cluster.router.complete(ROLLOUT, request("a"))

    asyncio.run(scene())


def test_an_order_to_a_node_that_is_lost_ends_at_once_with_why(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(tmp_path) as cluster:
            forward = c.Forward(role=ROLLOUT, sample=request("a"))
            waiting = asyncio.ensure_future(cluster.peers.request(1, forward, 3600.0))
            await until_asked(cluster, 1)
            cluster.peers.exclude(1, WHY)
            with pytest.raises(WorkerFailed, match=r"node1 was not heard of for 10\.0 s"):
                await asyncio.wait_for(waiting, HANG_S)
            with pytest.raises(WorkerFailed, match=r"node1 was not heard of for 10\.0 s"):
                await cluster.peers.request(1, forward, 3600.0)

    asyncio.run(scene())


def test_who_hears_of_a_newer_attempt_over_a_line_it_dialled_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        context = zmq.Context()
        keys = make_keys(tmp_path / "keys")

        async def ignored(sender: str, body: m.Message) -> None:
            heard.set()

        heard = asyncio.Event()
        socket = listening_socket(context, "tcp://127.0.0.1:*", keys)
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        newer = Channel(socket, attempt=2, handler=ignored)
        peers = Peers()
        peers.lines.dial_with(
            lambda name, at: Channel(
                calling_socket(context, address, "node0", keys), attempt=1, handler=ignored, peer="node1"
            )
        )
        ends = asyncio.ensure_future(peers.lines.failure())
        await peers.tell(1, c.Alive())
        while not ends.done():
            await newer.tell("node0", c.Alive())
            await asyncio.sleep(0.05)
        with pytest.raises(StaleAttempt):
            await ends
        assert not heard.is_set(), "neither acts on what the other says"
        await peers.lines.close()
        await newer.close()
        context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(scene(), HANG_S))
