"""Sockets between controllers: encrypted, fenced by epoch, and never waited on for ever."""

import asyncio
from pathlib import Path

import pytest
import zmq

from yatt.adapters.wire import Channel, CurveKeys, Fence, calling_socket, listening_socket, make_keys
from yatt.errors import DeadlineExceeded, StaleEpoch
from yatt.records import message as m
from yatt.records.codec import decode_frame, encode_frame


async def echo(_: str, body: m.Message) -> m.Message | None:
    return body if isinstance(body, m.Stop) else m.Done()


async def asked(
    folder: Path, *, hub_epoch: int = 3, line_epoch: int = 3, line_keys: CurveKeys | None = None
) -> m.Message:
    """The answer to one request over real TCP, or what ended the hub's reader."""
    keys, context = make_keys(folder / "keys"), zmq.Context()
    socket = listening_socket(context, "tcp://127.0.0.1:*", keys)
    hub = Channel(socket, epoch=hub_epoch, handler=echo)
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    line = Channel(
        calling_socket(context, address, "node1", line_keys or keys),
        epoch=line_epoch, handler=echo, peer="node0",
    )  # fmt: skip
    failed = asyncio.ensure_future(hub.failure())
    try:
        return await line.request("node0", m.Stop(), 1.0)
    finally:
        has_failed = failed.done()
        if not has_failed:
            failed.cancel()
        await asyncio.gather(line.close(), hub.close())
        context.destroy(linger=0)
        if has_failed:
            failed.result()


def test_a_request_is_answered(tmp_path: Path) -> None:
    assert asyncio.run(asked(tmp_path)) == m.Stop()


def test_a_peer_with_the_keys_of_another_run_is_not_heard(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="node0 did not answer Stop within 1 s"):
        asyncio.run(asked(tmp_path, line_keys=make_keys(tmp_path / "other")))


def test_a_ghost_of_a_lower_epoch_is_not_answered(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded):
        asyncio.run(asked(tmp_path, hub_epoch=3, line_epoch=2))


def test_who_hears_a_higher_epoch_knows_it_is_the_ghost(tmp_path: Path) -> None:
    with pytest.raises(StaleEpoch, match="is of epoch 4, this process of 3"):
        asyncio.run(asked(tmp_path, hub_epoch=3, line_epoch=4))


def test_a_frame_is_acted_on_once() -> None:
    fence = Fence(3)
    frames = [decode_frame(encode_frame(3, seq, 0, m.Done())) for seq in (1, 2, 2, 1, 3)]
    assert [fence.admits("a", frame) for frame in frames] == [True, True, False, False, True]
    assert fence.admits("b", frames[0]), "another sender counts for itself"
