"""Ranges of memory between nodes: who has the ticket gets exactly what was offered, nobody else anything."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.runs import HANG_S
from yatt.adapters.net import bulk
from yatt.errors import WorkerFailed

BLOCK, SIZE = 1000, 7_300


class Offered:
    """Random bytes, which may become invalid."""

    def __init__(self) -> None:
        self.data, self.valid_for = os.urandom(SIZE), 10**9

    @property
    def size_bytes(self) -> int:
        return SIZE

    def block(self, begin: int, end: int) -> memoryview:
        return memoryview(self.data)[begin:end]

    def is_valid(self) -> bool:
        self.valid_for -= 1
        return self.valid_for >= 0


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BLOCK_BYTES", BLOCK)


@pytest.fixture
def server() -> Iterator[bulk.BulkServer]:
    made = bulk.BulkServer("127.0.0.1")
    yield made
    made.close()


def got(ticket: bulk.Ticket, begin: int = 0, end: int = SIZE) -> dict[int, bytes]:
    blocks: dict[int, bytes] = {}
    bulk.receive_bytes(ticket, begin, end, Taken(blocks))
    return blocks


class Taken:
    """Keeps blocks as they come; a change with its mark."""

    def __init__(self, blocks: dict[int, bytes]) -> None:
        self.blocks = blocks

    @contextlib.contextmanager
    def place(self, begin: int, size: int) -> Iterator[memoryview]:
        yield memoryview(target := bytearray(size))
        self.blocks[begin] = bytes(target)

    def change(self, begin: int, size: int, change: bytes) -> None:
        assert len(change) < size
        self.blocks[begin] = b"change:" + change


def test_any_range_of_whole_blocks_is_what_was_offered(server: bulk.BulkServer) -> None:
    offered = Offered()
    ticket = server.offer(offered)
    for begin, end in ((0, SIZE), (3000, 5000), (7000, SIZE)):
        blocks = got(ticket, begin, end)
        assert list(blocks) == list(range(begin, end, BLOCK))
        assert b"".join(blocks.values()) == offered.data[begin:end]


@pytest.mark.parametrize(("begin", "end"), [(1, SIZE), (0, 999), (0, SIZE + 1), (7000, 8000), (2000, 2000)])
def test_a_range_of_other_blocks_is_refused_because_a_nonce_seals_one_block_only(
    server: bulk.BulkServer, begin: int, end: int
) -> None:
    ticket = server.offer(Offered())
    with socket.create_connection((ticket.host, ticket.port), timeout=HANG_S) as connection:
        connection.sendall(bulk._HELLO.pack(ticket.name, begin, end))
        assert connection.recv(100) == b""


def test_without_the_key_there_are_only_sealed_bytes_and_without_the_name_none(
    server: bulk.BulkServer,
) -> None:
    offered = Offered()
    ticket = server.offer(offered)
    with pytest.raises(WorkerFailed, match="a block is not what was sealed there"):
        got(replace(ticket, key=bytes(32)))
    with pytest.raises(WorkerFailed, match="ended the transfer"):
        got(replace(ticket, name=bytes(16)))
    with socket.create_connection((ticket.host, ticket.port), timeout=HANG_S) as connection:
        connection.sendall(bulk._HELLO.pack(ticket.name, 0, BLOCK))
        sealed = b"".join(iter(lambda: connection.recv(4096), b""))
    assert len(sealed) == 4 + BLOCK + 16
    assert not any(offered.data[at : at + 8] in sealed for at in range(0, BLOCK, 8))


@pytest.mark.parametrize("change", ["a bit", "a shorter size", "two blocks swapped", "of another offer"])
def test_what_is_changed_on_the_way_is_refused(server: bulk.BulkServer, change: str) -> None:
    ticket, other = server.offer(Offered()), server.offer(Offered())

    def sealed(of: bulk.Ticket, begin: int) -> bytes:
        with socket.create_connection((of.host, of.port), timeout=HANG_S) as connection:
            connection.sendall(bulk._HELLO.pack(of.name, begin, begin + BLOCK))
            return b"".join(iter(lambda: connection.recv(4096), b""))

    block = sealed(ticket, 0)
    data = {
        "a bit": block[:7] + bytes([block[7] ^ 4]) + block[8:],
        "a shorter size": (BLOCK - 1).to_bytes(4, "big") + block[4:],
        "two blocks swapped": sealed(ticket, BLOCK),
        "of another offer": sealed(other, 0),
    }[change]
    assert data != block
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(WorkerFailed, match="not what was sealed"):
        got(replace(ticket, port=listener.getsockname()[1]), 0, BLOCK)
    thread.join()
    listener.close()


def test_a_shorter_block_is_a_change_and_a_longer_one_is_refused(server: bulk.BulkServer) -> None:
    offered = Offered()
    changes = {BLOCK: b"", 3 * BLOCK: os.urandom(20), 7 * BLOCK: b"x" * 299}
    offered.block = lambda begin, end: changes.get(begin, memoryview(offered.data)[begin:end])  # type: ignore
    blocks = got(server.offer(offered))
    for begin in range(0, SIZE, BLOCK):
        whole = offered.data[begin : begin + BLOCK]
        assert blocks[begin] == (b"change:" + changes[begin] if begin in changes else whole)
    offered.block = lambda begin, end: memoryview(offered.data)[begin : end + 1]  # type: ignore
    with pytest.raises((WorkerFailed, OSError)):
        got(server.offer(offered), 0, BLOCK)


def test_what_becomes_invalid_is_not_sent_on(server: bulk.BulkServer) -> None:
    offered = Offered()
    ticket, offered.valid_for = server.offer(offered), 3
    blocks: dict[int, bytes] = {}
    with pytest.raises(WorkerFailed, match="its offer has changed"):
        bulk.receive_bytes(ticket, 0, SIZE, Taken(blocks))
    assert list(blocks) == [0, BLOCK, 2 * BLOCK]


def test_old_offers_end_and_strangers_cost_a_slot_for_a_limited_time(
    server: bulk.BulkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MAX_OFFERS", 2)
    monkeypatch.setattr(bulk, "HELLO_S", 0.3)
    tickets = [server.offer(Offered()) for _ in range(3)]
    with pytest.raises(WorkerFailed):
        got(tickets[0])
    silent = [socket.create_connection((tickets[0].host, tickets[0].port)) for _ in range(5)]
    assert len(got(tickets[2])) == 8
    for connection in silent:
        connection.settimeout(HANG_S)
        assert connection.recv(1) == b"", "given up after HELLO_S"
        connection.close()
    slow = socket.create_connection((tickets[0].host, tickets[0].port), timeout=HANG_S)
    num_bytes = 0
    with contextlib.suppress(OSError):
        while num_bytes < bulk._HELLO.size:
            slow.sendall(b"x")
            num_bytes += 1
            time.sleep(0.2)
    assert num_bytes < bulk._HELLO.size, "a byte now and then is no hello"
    slow.close()
    server.close()
    with pytest.raises((WorkerFailed, OSError)):
        got(tickets[2])
