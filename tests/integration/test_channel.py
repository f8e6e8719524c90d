"""Sockets between controllers: encrypted, fenced by attempt, and never waited on for ever."""

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests import runs
from tests.runs import HANG_S
from tests.seeds import seed_of
from yatt.adapters.net import channel as channels
from yatt.adapters.net.channel import Channel, Handler
from yatt.adapters.net.curve import CurveKeys, Socket, calling_socket, listening_socket, make_keys
from yatt.adapters.net.fence import Fence
from yatt.errors import DeadlineExceeded, StaleAttempt, WorkerFailed
from yatt.records import message as m
from yatt.records.codec import decode_frame, encode_frame


def question(number: int) -> m.Ask:
    """An order with a number, which is in its answer too."""
    return m.Ask(genrm="judge", text=str(number), seed=0, max_tokens=1, temperature=0.0)


def reply(body: m.Message) -> m.Message:
    return m.Answered(text=body.text, finish_reason="stop") if isinstance(body, m.Ask) else m.Done()


async def echo(_: str, body: m.Message) -> m.Message | None:
    return reply(body)


async def asked(
    folder: Path, *, server_attempt: int = 3, client_attempt: int = 3, line_keys: CurveKeys | None = None
) -> m.Message:
    """The answer to one request over real TCP, or what ended the server's reader."""
    keys, context = make_keys(folder / "keys"), zmq.Context()
    socket = listening_socket(context, "tcp://127.0.0.1:*", keys)
    server = Channel(socket, attempt=server_attempt, handler=echo)
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    client = Channel(
        calling_socket(context, address, "node1", line_keys or keys),
        attempt=client_attempt, handler=echo, peer="node0",
    )  # fmt: skip
    failed = asyncio.ensure_future(server.failure())
    try:
        return await client.request("node0", m.Stop(), 1.0)
    finally:
        has_failed = failed.done()
        if not has_failed:
            failed.cancel()
        await asyncio.gather(client.close(), server.close())
        context.destroy(linger=0)
        if has_failed:
            failed.result()


def test_a_request_is_answered(tmp_path: Path) -> None:
    assert asyncio.run(asked(tmp_path)) == m.Done()


def test_a_peer_with_the_keys_of_another_run_is_not_heard(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="node0 did not answer Stop within 1 s"):
        asyncio.run(asked(tmp_path, line_keys=make_keys(tmp_path / "other")))


def test_a_ghost_of_a_lower_attempt_is_not_answered(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded):
        asyncio.run(asked(tmp_path, server_attempt=3, client_attempt=2))


def test_who_hears_a_higher_attempt_knows_it_is_the_ghost(tmp_path: Path) -> None:
    with pytest.raises(StaleAttempt, match="is of attempt 4, this process of 3"):
        asyncio.run(asked(tmp_path, server_attempt=3, client_attempt=4))


def test_a_frame_is_acted_on_once() -> None:
    fence = Fence(3)
    frames = [decode_frame(encode_frame(3, seq, 0, m.Done())) for seq in (1, 2, 2, 1, 3)]
    assert [fence.admits("a", frame) for frame in frames] == [True, True, False, False, True]
    assert fence.admits("b", frames[0]), "another sender counts for itself"


@contextlib.asynccontextmanager
async def connected(
    folder: Path, handler: Handler, back: Handler = echo
) -> AsyncIterator[tuple[Channel, Channel]]:
    """A server and a client to it over CURVE TCP: the server answers by `handler`, the client by `back`."""
    keys, context = make_keys(folder / "keys"), zmq.Context()
    socket = listening_socket(context, "tcp://127.0.0.1:*", keys)
    server = Channel(socket, attempt=3, handler=handler)
    calling = calling_socket(context, socket.getsockopt_string(zmq.LAST_ENDPOINT), "node1", keys)
    client = Channel(calling, attempt=3, handler=back, peer="node0")
    try:
        yield server, client
    finally:
        await asyncio.gather(client.close(), server.close())
        context.destroy(linger=0)


def alive(index: int) -> m.Message:
    """A message with a number."""
    return m.Renew(token=1, turns=0, work=index)


class Ear:
    """A handler that notes the numbers it hears, and answers only Stop."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def __call__(self, _: str, body: m.Message) -> m.Message | None:
        if isinstance(body, m.Renew):
            self.heard.append(body.work)
        return m.Done() if isinstance(body, m.Stop) else None

    async def until(self, count: int) -> None:
        await runs.until(lambda: len(self.heard) >= count, f"{count} messages")


def test_thousands_at_once_both_ways_all_arrive_in_order(tmp_path: Path) -> None:
    """The descriptor tells of a change once: whoever sends between two looks must look again."""
    count, at_server, at_client = 5000, Ear(), Ear()

    async def scene() -> None:
        async with connected(tmp_path, at_server, at_client) as (server, client):
            await client.request("node0", m.Stop(), HANG_S)
            for index in range(count):
                await client.tell("node0", alive(index))
                await server.tell("node1", alive(index))
                if index % 7 == 0:
                    await asyncio.sleep(0)
            await at_server.until(count)
            await at_client.until(count)

    asyncio.run(scene())
    assert at_server.heard == list(range(count))
    assert at_client.heard == list(range(count))


def test_a_thousand_requests_at_once_are_each_answered_though_the_other_end_asks_as_well(
    tmp_path: Path,
) -> None:
    async def same(_: str, body: m.Message) -> m.Message | None:
        await asyncio.sleep(0)
        return reply(body)

    async def scene() -> None:
        async with connected(tmp_path, same, lambda _, body: reply(body)) as (server, client):
            await client.request("node0", m.Stop(), HANG_S)
            asked = [question(index) for index in range(1000)]
            answers = [reply(body) for body in asked]
            to_server = asyncio.gather(*(client.request("node0", body, HANG_S) for body in asked))
            to_client = asyncio.gather(*(server.request("node1", body, HANG_S) for body in asked))
            assert await to_server == answers and await to_client == answers

    asyncio.run(scene())


class Teller:
    """Answers an order between three messages and three more, all of which can then be read at once."""

    line: Channel

    def __call__(self, _: str, body: m.Message) -> m.Message | None:
        self._tell(0)
        asyncio.get_running_loop().call_soon(self._tell, 3)  # after the answer
        return reply(body)

    def _tell(self, first: int) -> None:
        for index in range(first, first + 3):
            self.line.send("node0", alive(index))
        time.sleep(0.02)  # the other end, in the same loop, does not read meanwhile


def test_messages_before_an_answer_are_handled_before_its_task_goes_on_and_later_ones_after(
    tmp_path: Path,
) -> None:
    ear, teller = Ear(), Teller()

    async def scene() -> None:
        async with connected(tmp_path, ear, teller) as (server, client):
            teller.line = client
            await client.request("node0", m.Stop(), HANG_S)
            for _ in range(20):
                ear.heard.clear()
                await server.request("node1", question(0), HANG_S)
                ear.heard.append(-1)
                await ear.until(7)
                assert ear.heard == [0, 1, 2, -1, 3, 4, 5]

    asyncio.run(asyncio.wait_for(scene(), HANG_S))


def test_others_have_their_turn_while_much_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MOST_AT_ONCE", 10)
    ear, most_a_turn = Ear(), 0

    async def scene() -> None:
        nonlocal most_a_turn
        async with connected(tmp_path, ear) as (_, client):
            for index in range(500):
                await client.tell("node0", alive(index))
            while len(ear.heard) < 500:
                before = len(ear.heard)
                await asyncio.sleep(0)
                most_a_turn = max(most_a_turn, len(ear.heard) - before)

    asyncio.run(scene())
    assert len(ear.heard) == 500
    assert most_a_turn <= 20, "the descriptor's own call and the one that goes on may fall into one turn"


def test_a_worker_that_is_not_there_cannot_be_asked_and_need_not_be_told(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path, echo) as (server, client):
            await server.tell("nobody", m.Done())
            with pytest.raises(
                DeadlineExceeded, match=r"nobody did not answer Stop within 5 s \(Host unreachable\)"
            ):
                await server.request("nobody", m.Stop(), 5.0)
            assert await client.request("node0", m.Stop(), HANG_S) == m.Done(), (
                "the server still hears others"
            )

    asyncio.run(scene())


def test_a_request_without_an_answer_ends_at_its_deadline_and_what_comes_later_is_dropped(
    tmp_path: Path,
) -> None:
    async def slow(_: str, body: m.Message) -> m.Message | None:
        await asyncio.sleep(0.3)
        return reply(body)

    async def scene() -> None:
        async with connected(tmp_path, slow) as (_, client):
            with pytest.raises(DeadlineExceeded, match=r"node0 did not answer Stop within 0.1 s \(silent\)"):
                await client.request("node0", m.Stop(), 0.1)
            assert await client.request("node0", question(7), HANG_S) == reply(question(7))

    asyncio.run(scene())


def test_an_answer_that_is_none_to_this_order_is_a_failed_order(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path, lambda _, body: m.Answered(text="", finish_reason="stop")) as (
            _,
            client,
        ):
            failed = await client.request("node0", m.Stop(), HANG_S)
            assert failed == m.Failed(error="node0 answered Stop by Answered")

    asyncio.run(scene())


def test_a_request_to_what_is_gone_ends_with_the_error_that_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(tmp_path, lambda _, body: None) as (_, client):
            waiting = asyncio.ensure_future(client.request("node0", m.Stop(), HANG_S))
            await asyncio.sleep(0.05)
            client.fail_waiting("node7", WorkerFailed("another"))
            client.fail_waiting("node0", WorkerFailed("node0 is gone"))
            with pytest.raises(WorkerFailed, match="node0 is gone"):
                await waiting

    asyncio.run(scene())


def test_closing_ends_the_requests_and_handlers_under_way(tmp_path: Path) -> None:
    begun, ended = asyncio.Event(), []

    async def never(_: str, body: m.Message) -> m.Message | None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(body)
        return body

    async def scene() -> None:
        async with connected(tmp_path, never) as (server, client):
            waiting = asyncio.ensure_future(client.request("node0", m.Stop(), HANG_S))
            await begun.wait()
            await asyncio.gather(client.close(), server.close())
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(waiting, HANG_S)
            assert ended == [m.Stop()]
            await client.tell("node0", m.Done())
            with pytest.raises(DeadlineExceeded):
                await client.request("node0", m.Stop(), 1.0)

    asyncio.run(scene())


def test_whatever_a_handler_raises_is_answered_and_costs_its_message_alone(tmp_path: Path) -> None:
    def handler(_: str, body: m.Message) -> m.Message | None:
        if isinstance(body, m.Ask):
            raise RuntimeError("at once")
        return reply(body)

    async def later(_: str, body: m.Message) -> m.Message | None:
        raise KeyError("later")

    async def scene() -> None:
        async with connected(tmp_path, handler, later) as (server, client):
            failed = await client.request("node0", question(1), HANG_S)
            assert failed == m.Failed(error="a defect at Ask: RuntimeError: at once")
            assert await client.request("node0", m.Stop(), HANG_S) == m.Done()
            failed = await server.request("node1", m.Stop(), HANG_S)
            assert failed == m.Failed(error="a defect at Stop: KeyError: 'later'")

    asyncio.run(scene())


def bad_frames(draw: random.Random, count: int) -> list[bytes]:
    """Random bytes, and good frames with bytes changed, cut or added."""
    good = encode_frame(3, 9, 0, m.Renew(token=1, turns=0, work=1))
    frames = [b"", b"no frame", encode_frame(3, 1, 0, m.Done())[:-3], good + b"x", b"\xc1", b"\x96\x03"]
    while len(frames) < count:
        frame = bytearray(good if draw.random() < 0.7 else draw.randbytes(draw.randrange(60)))
        for _ in range(draw.randrange(1, 4)):
            if frame:
                frame[draw.randrange(len(frame))] = draw.randrange(256)
        frames.append(bytes(frame[: draw.randrange(len(frame) + 1)] if draw.random() < 0.2 else frame))
    return frames


def test_what_is_no_frame_is_dropped_and_counted_and_ends_nobody(tmp_path: Path) -> None:
    seed = seed_of("YATT_FUZZ_SEED")
    draw = random.Random(seed)

    def is_of_a_higher_attempt(data: bytes) -> bool:
        with contextlib.suppress(msgspec.MsgspecError):
            return decode_frame(data).attempt > 3
        return False

    async def scene() -> None:
        async with connected(tmp_path, echo) as (server, client):
            failed = asyncio.ensure_future(server.failure())
            for data in bad_frames(draw, 5000):
                if not is_of_a_higher_attempt(data):
                    client._out.socket.send(data)
            client._out.socket.send_multipart([b"two", b"parts"])
            client._out.seqs["node0"] = 60000  # those before may have been used up by what was random
            assert await client.request("node0", m.Stop(), HANG_S) == m.Done(), seed
            assert server.num_dropped > 500, seed
            assert not failed.done(), seed
            failed.cancel()

    asyncio.run(scene())


def test_a_request_that_cannot_be_read_is_answered_at_once_and_not_acted_on(tmp_path: Path) -> None:
    acted: list[m.Message] = []

    async def note(_: str, body: m.Message) -> m.Message:
        acted.append(body)
        return m.Done()

    async def scene() -> None:
        async with connected(tmp_path, note) as (server, client):
            assert await client.request("node0", m.Stop(), HANG_S) == m.Done(), (
                "no stranger: it was answered before"
            )
            acted.clear()
            fraction: Any = 4.5
            ask = m.Ask(genrm="judge", text="", seed=1, max_tokens=fraction, temperature=0.0)
            failed = await client.request("node0", ask, 20.0)
            assert isinstance(failed, m.Failed) and not failed.user
            assert "not a valid message: Expected `int`, got `float` - at `$.max_tokens`" in failed.error
            assert server.num_dropped == 1 and not acted
            assert await client.request("node0", m.Stop(), HANG_S) == m.Done()

    asyncio.run(scene())


class Lossy:
    """A socket that loses some of what is sent over it."""

    def __init__(self, socket: Socket, loses: Callable[[], bool]) -> None:
        self._socket, self._loses = socket, loses

    def send(self, data: bytes, flags: int = 0, *, copy: bool = True) -> None:
        if not self._loses():
            self._socket.send(data, flags, copy=copy)

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)


def test_requests_and_answers_that_are_lost_come_all_the_same_and_are_acted_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "RESEND_S", 0.05)
    draw, acted = random.Random(7), Counter[int]()

    async def slow(_: str, body: m.Message) -> m.Message | None:
        assert isinstance(body, m.Ask)
        acted[int(body.text)] += 1
        await asyncio.sleep(0.12 if int(body.text) % 3 else 0)
        return reply(body)

    async def scene() -> None:
        async with connected(tmp_path, slow) as (_, client):
            client._resend_s = 0.05
            client._out.socket = Lossy(client._out.socket, lambda: draw.random() < 0.4)
            calls = (client.request("node0", question(index), HANG_S) for index in range(200))
            answers = await asyncio.gather(*calls)
            assert answers == [reply(question(index)) for index in range(200)]

    asyncio.run(scene())
    assert set(acted.values()) == {1}, acted


def test_answers_that_nobody_waits_for_are_not_kept(tmp_path: Path) -> None:
    """Neither end keeps more than the last answers of thousands, one request after the other; an open request
    is answered again however many came after it."""
    released = asyncio.Event()

    async def handler(_: str, body: m.Message) -> m.Message | None:
        if isinstance(body, m.Ask) and body.text == "0":
            await released.wait()
        return reply(body)

    async def scene() -> None:
        async with connected(tmp_path, handler) as (server, client):
            for _ in range(2):
                for index in range(1, 500):
                    assert await client.request("node0", question(index), HANG_S) == reply(question(index))
                    assert await server.request("node1", m.Stop(), HANG_S) == m.Done()
                assert len(server._answers._kept) <= 2 and len(client._answers._kept) <= 2
            lost = [True]
            server._out.socket = Lossy(
                server._out.socket, lambda: released.is_set() and bool(lost) and lost.pop()
            )
            client._resend_s = 0.05
            first = asyncio.ensure_future(client.request("node0", question(0), HANG_S))
            for index in range(1, 500):
                assert await client.request("node0", question(index), HANG_S) == reply(question(index))
            assert len(server._answers._kept) > 490, "a request older than these is open"
            released.set()
            assert await first == reply(question(0))
            assert await client.request("node0", m.Stop(), HANG_S) == m.Done()
            assert len(server._answers._kept) <= 2

    asyncio.run(scene())


def test_a_deadline_counts_only_while_nothing_moves(tmp_path: Path) -> None:
    steps = itertools.count()

    async def long(_: str, body: m.Message) -> m.Message | None:
        await asyncio.sleep(1.5)
        return reply(body)

    async def asked_with(progress: Callable[[str], int]) -> m.Message:
        async with connected(tmp_path, long) as (server, client):
            server._in.progress, client._resend_s = progress, 0.1
            return await client.request("node0", m.Stop(), 0.6)

    assert asyncio.run(asked_with(lambda _: next(steps))) == m.Done()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.6 s"):
        asyncio.run(asked_with(lambda _: 5))


LAST_WORD = """
import os, sys
from yatt.adapters.net.worker_link import WorkerLink
from yatt.records import message as m
link = WorkerLink(sys.argv[1], worker=sys.argv[2], attempt=3)
link.send(m.Failed(error="mine", exit_code=2))
link.close()
os._exit(0)
"""


def test_what_a_worker_says_last_arrives_though_it_ends_at_once(tmp_path):
    """Also before its client is up."""

    async def play() -> set[str]:
        context, heard = zmq.Context(), set()

        def hear(sender: str, _: m.Message) -> None:
            heard.add(sender)

        endpoint = f"ipc://{tmp_path}/server"
        server = Channel(listening_socket(context, endpoint), attempt=3, handler=hear)
        argv = [sys.executable, "-c", LAST_WORD, endpoint]
        workers = [await asyncio.create_subprocess_exec(*argv, f"w{number}") for number in range(8)]
        assert [await worker.wait() for worker in workers] == [0] * 8
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANG_S):
                while len(heard) < 8:
                    await asyncio.sleep(0.01)
        await server.close()
        context.term()
        return heard

    assert asyncio.run(play()) == {f"w{number}" for number in range(8)}
