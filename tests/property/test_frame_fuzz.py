"""Damaged frames at every socket of the channel: each is refused and counted, and none is acted on.

`YATT_FUZZ=5000 YATT_FUZZ_SEED=7 pytest tests/property/test_frame_fuzz.py` runs the long form. Without a seed
each run draws its own, and a failure prints it.
"""

import asyncio
import contextlib
import logging
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.frames import HUGE, as_message, damaged, frames, nonsense
from tests.runs import HANG_S
from tests.seeds import seed_of
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import CurveKeys, Gate, calling_socket, listening_socket, make_keys
from yatt.adapters.net.key_value import Call, KeyValueClient, KeyValueServer
from yatt.adapters.net.worker_link import WorkerLink
from yatt.errors import DeadlineExceeded, StaleAttempt
from yatt.records import message as m
from yatt.records.codec import encode_frame

COUNT = int(os.environ.get("YATT_FUZZ", "500"))
SEED = seed_of("YATT_FUZZ_SEED")
ATTEMPT = 3
"""A good request is answered within this, whatever came before it."""

pytestmark = pytest.mark.timeout(900 + COUNT // 10)


@pytest.fixture(autouse=True)
def nothing_is_told_with_a_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    errors = [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]
    assert not errors, (SEED, errors)


class Expected:
    """What a receiver of these frames has to make of them, by the rules alone."""

    def __init__(self, sent: list[list[bytes]]) -> None:
        self.acted, self.num_dropped, self.num_stale = [], 0, 0
        self.sent = []
        seen: set[int] = set()
        for parts in sent:
            found = as_message(parts[0]) if len(parts) == 1 else None
            envelope = found or notice(parts)
            if envelope and envelope[0] > ATTEMPT:
                continue  # ends who hears it, by design: not sent
            self.sent.append(parts)
            if not envelope:
                self.num_dropped += 1
            elif envelope[0] < ATTEMPT:
                self.num_stale += 1
            elif found is not None and found[1] not in seen and found[1] <= max(seen, default=0) + 65536:
                seen.add(found[1])
                self.acted += [found[3]] if found[2] == 0 else []
        self.next_seq = max(seen, default=0) + 1


def notice(parts: list[bytes]) -> list[int] | None:
    """A notice about a request, integers only; None if it is none."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        plain = msgspec.msgpack.decode(parts[0])
        if len(parts) == 1 and isinstance(plain, list) and [type(each) for each in plain] == [int] * 6:
            attempt, token, seq, kind, waits_from, progress = plain
            is_valid = min(attempt, token, waits_from) >= 0 and seq >= 1 and -3 <= kind < 0
            return [attempt, seq, kind, progress] if is_valid else None
    return None


def same(left: list[m.Message], right: list[m.Message]) -> bool:
    """Equal, a value that is no number too."""
    return list(map(repr, left)) == list(map(repr, right))


@pytest.mark.parametrize("is_hub", [True, False], ids=["to a server", "to a line"])
def test_a_channel_acts_on_valid_messages_alone_and_counts_all_others(tmp_path: Path, is_hub: bool) -> None:
    expected = Expected(list(frames(ATTEMPT, COUNT, random.Random(SEED))))
    acted: list[m.Message] = []
    unhandled: list[dict[str, Any]] = []

    def act(_: str, body: m.Message) -> m.Message | None:
        if isinstance(body, m.Hello) and body.pid == -7:
            return m.Done()
        acted.append(body)
        return None

    async def scene() -> Channel:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        keys, context = make_keys(tmp_path / "keys"), zmq.Context()
        hub_socket = listening_socket(context, "tcp://127.0.0.1:*", keys)
        address = hub_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        line_socket = calling_socket(context, address, "node1", keys)
        line_socket.send(b"")  # the server knows the line from now on
        assert hub_socket.recv_multipart() == [b"node1", b""]
        receiver, raw = (hub_socket, line_socket) if is_hub else (line_socket, hub_socket)
        channel = Channel(receiver, attempt=ATTEMPT, handler=act, peer="" if is_hub else "node0")
        to = [] if is_hub else [b"node1"]
        for number, parts in enumerate(expected.sent):
            raw.send_multipart([*to, *parts])
            if number % 64 == 0:
                await asyncio.sleep(0)
        good = encode_frame(ATTEMPT, expected.next_seq, 0, m.Hello(worker="", pid=-7))
        raw.send_multipart([*to, good])
        await answered(raw, expected.next_seq)
        assert not channel._ended.done(), SEED
        await channel.close()
        raw.close(linger=0)
        context.term()
        return channel

    channel = asyncio.run(scene())
    assert not unhandled, (SEED, unhandled)
    assert same(acted, expected.acted), SEED
    assert (channel.num_dropped, channel.num_stale) == (expected.num_dropped, expected.num_stale), SEED
    assert expected.num_dropped > COUNT // 3 and expected.num_stale and expected.acted


async def answered(raw: zmq.Socket, seq: int) -> None:
    """Wait for the answer to the request with this seq, among all else that is said."""
    async with asyncio.timeout(HANG_S):
        while True:
            with contextlib.suppress(zmq.Again):
                found = as_message(raw.recv_multipart(zmq.NOBLOCK)[-1])
                is_refusal = found is not None and isinstance(found[3], m.Failed)  # of a damaged one
                if found is not None and found[2] == seq and not is_refusal:
                    assert found[3] == m.Done()
                    return
                continue
            await asyncio.sleep(0.01)


def test_a_worker_takes_valid_orders_alone(tmp_path: Path) -> None:
    expected = Expected(list(frames(ATTEMPT, COUNT, random.Random(SEED + 1))))
    context, endpoint = zmq.Context(), f"ipc://{tmp_path}/server"
    server = listening_socket(context, endpoint)
    link = WorkerLink(endpoint, worker="engine", attempt=ATTEMPT)
    link.send(m.Done())
    server.recv_multipart()
    for parts in [*expected.sent, [encode_frame(ATTEMPT, expected.next_seq, 0, m.Stop())]]:
        server.send_multipart([b"engine", *parts])
    taken, last, until_s = [], None, time.monotonic() + HANG_S
    while last != expected.next_seq and time.monotonic() < until_s:
        order = link.receive(0.1)
        if order is not None:
            taken.append(order.body)
            last = order.seq
    link.close()
    server.close(linger=0)
    context.term()
    assert last == expected.next_seq and taken.pop() == m.Stop(), SEED
    answers = len(taken) - len(expected.acted)  # to what it never asked: its owner does not know them
    assert 0 <= answers < COUNT // 10, SEED
    assert same(taken, expected.acted) or answers, SEED


def calls(count: int, chance: random.Random) -> Iterator[list[bytes]]:
    """Calls of the key-value service: valid, with nonsense in them, and damaged."""
    kinds = ("set", "get", "add", "compare_set", "delete", "check", "count", "", "eval")
    for _ in range(count):
        call = Call(
            number=chance.choice((1, -1, *HUGE)), kind=chance.choice(kinds),
            keys=tuple(chance.choice(("a", "b", "", "x" * 2000)) for _ in range(chance.randrange(3))),
            value=chance.choice((b"", b"not a number", b"9" * 5000, b"7")), expected=b"",
            amount=chance.choice((0, 1, *HUGE)),
            park_s=chance.choice((0.0, 0.01, -1.0, 1e308, float("nan"), float("inf"))),
        )  # fmt: skip
        data = msgspec.msgpack.encode(call)
        data = chance.choice((data, damaged(data, chance), nonsense(ATTEMPT, 1, chance)))
        yield [data] if chance.random() < 0.95 else [b"", data, data]


def test_the_ranks_key_value_service_goes_on_serving(tmp_path: Path) -> None:
    keys, chance = make_keys(tmp_path / "keys"), random.Random(SEED + 2)
    server = KeyValueServer("127.0.0.1", keys)
    client = KeyValueClient("127.0.0.1", server.port, keys)
    context: zmq.Context = zmq.Context()
    raw = calling_socket(context, f"tcp://127.0.0.1:{server.port}", "stranger", keys)
    for parts in calls(COUNT, chance):
        raw.send_multipart(parts)
    raw.send(msgspec.msgpack.encode(Call(number=77, kind="set", keys=("k",), value=b"v")))
    try:
        until_s = time.monotonic() + HANG_S
        while not client.call("get", "k").found:
            assert time.monotonic() < until_s, SEED
            time.sleep(0.05)
        assert client.call("get", "k").value == b"v"
        assert server.num_dropped > COUNT // 4, SEED
    finally:
        client.close()
        server.close()
        context.destroy(linger=0)


def swapped(keys: CurveKeys, folder: Path) -> Path:
    """Keys with which a caller shows the server's own key."""
    shutil.copytree(keys.folder, folder)
    shutil.copy(keys.secret("server"), folder / "client.key_secret")
    return folder


@pytest.mark.parametrize("whose", ["other", "half"])
def test_whoever_has_no_key_of_the_run_is_not_heard_at_a_gate(tmp_path: Path, whose: str) -> None:
    from tests.integration.trainer.test_meeting import stranger_keys

    own = make_keys(tmp_path / "keys")
    for public in own.folder.glob("*.key"):  # a gate that looks for these just when they cannot be read
        public.unlink()
    strangers = dict(zip(("other", "half"), stranger_keys(tmp_path / "strangers", own), strict=True))
    heard: list[m.Message] = []

    async def scene() -> None:
        context = zmq.Context()
        gate = Gate(context, own)
        socket = listening_socket(context, "tcp://127.0.0.1:*", own)
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        server = Channel(socket, attempt=ATTEMPT, handler=lambda _, body: heard.append(body) or m.Done())
        lines = []

        async def asked(keys: CurveKeys, limit_s: float) -> m.Message:
            lines.append(Channel(calling_socket(context, address, "node1", keys), attempt=ATTEMPT,
                                 handler=lambda _, body: None, peer="node0"))  # fmt: skip
            return await lines[-1].request("node0", m.Stop(), limit_s)

        with pytest.raises(DeadlineExceeded):
            await asked(strangers[whose], 1.0)
        with pytest.raises(DeadlineExceeded):  # a server's key is no caller's
            await asked(CurveKeys(swapped(own, tmp_path / "swapped")), 1.0)
        assert not heard
        assert await asked(own, HANG_S) == m.Done()
        await asyncio.gather(server.close(), *(line.close() for line in lines))
        gate.close()
        context.destroy(linger=0)

    asyncio.run(scene())


def test_a_message_of_a_higher_attempt_ends_the_reading_and_is_not_acted_on(tmp_path: Path) -> None:
    acted: list[m.Message] = []

    async def scene() -> None:
        context, endpoint = zmq.Context(), f"ipc://{tmp_path}/server"
        channel = Channel(
            listening_socket(context, endpoint), attempt=ATTEMPT, handler=lambda _, b: acted.append(b)
        )
        raw = calling_socket(context, endpoint, "node1")
        for damage in (b"\x94\x09\x01\x00\x01", b"\x94\x09\x01\xff\xa1x", b"\x94\x09\x01\xf0\x01"):
            raw.send(damage)  # of a newer attempt, and no message or notice
        raw.send(encode_frame(ATTEMPT + 1, 1, 0, m.Stop()))
        with pytest.raises(StaleAttempt):
            await asyncio.wait_for(channel.failure(), HANG_S)
        assert channel.num_dropped == 3
        await channel.close()
        context.destroy(linger=0)

    asyncio.run(scene())
    assert not acted
