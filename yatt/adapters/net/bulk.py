"""Ranges of memory over TCP between nodes, encrypted and authenticated, by threads. No torch.

Whoever may read something gets a ticket over a channel that is authenticated already: the name of an offer
and its key. It connects, names the offer and a range, and gets the range in blocks, each sealed with
AES-256-GCM: the key is the offer's, the nonce the block's offset, the associated data the offer's name. A
block may be sent as a change (`yatt.adapters.net.changes`) if the caller has the former version; it is
shorter than the block. Before each block comes its size in 4 bytes. A stranger gets nothing but bytes that he
cannot read, and nothing that he sends is accepted.

A key and a nonce seal one content only: blocks begin at multiples of `BLOCK_BYTES`, and a block is sent only
if its source is still valid after it was sealed.
"""

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from yatt.errors import WorkerFailed

BLOCK_BYTES = 1 << 20
STALL_S = 30.0
"""Longest time without progress of a connection."""

HELLO_S = 3.0
"""Longest time for a caller to name an offer."""

MAX_OFFERS, MAX_CONNECTIONS, MAX_CALLERS = 4096, 256, 64
"""Offers; connections that are served at once, others wait; callers that have not named an offer yet."""

PAUSE_S = 0.1
_NAME_BYTES, _TAG_BYTES = 16, 16
_HELLO, _SIZE = struct.Struct(f">{_NAME_BYTES}sQQ"), struct.Struct(">I")


class Offer(Protocol):
    """What is offered."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""

    def block(self, begin: int, end: int) -> memoryview | bytes:
        """Returns bytes [begin, end), or a shorter change; they may have to be waited for.

        Raises:
            WorkerFailed: they will not come.
        """

    def is_valid(self) -> bool:
        """Whether what `block` returned is, still, of the version that was offered."""


class BlockTarget(Protocol):
    """Where received blocks go."""

    def place(self, begin: int, size: int) -> AbstractContextManager[memoryview]:
        """Gives the memory of a block. When the context ends without an error, it is filled."""

    def change(self, begin: int, size: int, change: bytes) -> None:
        """Applies a change to the former version of a block.

        Raises:
            WorkerFailed: it is not one.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to read an offer, for one caller. `key` is secret."""

    host: str
    port: int
    name: bytes
    key: bytes


class BulkServer:
    """Listens on a free port of `host` and serves offers, until `close`."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=MAX_CONNECTIONS)
        self._host, self._port = host, int(self._listener.getsockname()[1])
        self._offers: OrderedDict[bytes, tuple[bytes, Offer]] = OrderedDict()
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._callers = threading.BoundedSemaphore(MAX_CALLERS)
        threading.Thread(target=self._accept, name="bulk-server", daemon=True).start()

    def offer(self, source: Offer) -> Ticket:
        """Offers a source; the oldest of `MAX_OFFERS` offers is withdrawn."""
        name, key = secrets.token_bytes(_NAME_BYTES), AESGCM.generate_key(256)
        self._offers[name] = key, source
        while len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
        return Ticket(host=self._host, port=self._port, name=name, key=key)

    def close(self) -> None:
        """Stops listening and withdraws all offers; connections end at their next block."""
        self._offers.clear()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for a caller
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(PAUSE_S)  # too many open files, or a caller that left at once
                continue
            if not self._callers.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="bulk", daemon=True).start()
            except RuntimeError:  # no thread can be started now
                connection.close()
                self._callers.release()

    def _serve(self, connection: socket.socket) -> None:
        """Serves one caller. Whatever goes wrong, the connection ends, and the caller tells it by that."""
        with connection, contextlib.suppress(OSError, WorkerFailed, ValueError):
            try:
                name, begin, end = _HELLO.unpack(_received(connection, _HELLO.size, HELLO_S))
            finally:
                self._callers.release()
            offer = self._offers.get(name)
            if offer is None or not self._slots.acquire(timeout=STALL_S / 2):
                return
            try:
                connection.settimeout(STALL_S)
                self._send(connection, name, *offer, begin, end)
            finally:
                self._slots.release()

    def _send(
        self, connection: socket.socket, name: bytes, key: bytes, source: Offer, begin: int, end: int
    ) -> None:
        size_bytes = source.size_bytes
        if begin % BLOCK_BYTES or not begin < end <= size_bytes or (end % BLOCK_BYTES and end != size_bytes):
            return
        cipher, sealed = AESGCM(key), memoryview(bytearray(_SIZE.size + BLOCK_BYTES + _TAG_BYTES))
        for at in range(begin, end, BLOCK_BYTES):
            block = source.block(at, min(at + BLOCK_BYTES, end))
            _SIZE.pack_into(sealed, 0, len(block))
            out = sealed[: _SIZE.size + len(block) + _TAG_BYTES]
            cipher.encrypt_into(_nonce(at), block, name, out[_SIZE.size :])
            if name not in self._offers or not source.is_valid():
                return
            connection.sendall(out)


def receive_bytes(ticket: Ticket, begin: int, end: int, target: BlockTarget) -> None:
    """Receives bytes [begin, end) of an offer, in blocks, in order.

    Args:
        begin, end: multiples of `BLOCK_BYTES`; `end` may be the offer's end.

    Raises:
        WorkerFailed: the offer is gone, the bytes are not those that were sealed, or `target` raised it.
        OSError: the connection failed, or had no progress.
    """
    cipher, sealed = AESGCM(ticket.key), memoryview(bytearray(BLOCK_BYTES + _TAG_BYTES))
    with socket.create_connection((ticket.host, ticket.port), timeout=STALL_S) as connection:
        connection.sendall(_HELLO.pack(ticket.name, begin, end))
        for at in range(begin, end, BLOCK_BYTES):
            size = min(BLOCK_BYTES, end - at)
            (sent,) = _SIZE.unpack(_received_in_time(connection, _SIZE.size))
            if sent > size:
                raise WorkerFailed(f"{ticket.host} port {ticket.port}: a block of {sent} bytes for {size}")
            block = sealed[: sent + _TAG_BYTES]
            _receive_into(connection, block)
            try:
                if sent < size:
                    target.change(at, size, cipher.decrypt(_nonce(at), block, ticket.name))
                    continue
                with target.place(at, size) as place:
                    cipher.decrypt_into(_nonce(at), block, ticket.name, place)
            except InvalidTag:
                raise WorkerFailed(
                    f"{ticket.host} port {ticket.port}: a block is not what was sealed there"
                ) from None


def _nonce(at: int) -> bytes:
    return at.to_bytes(12, "big")


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _received(connection: socket.socket, size: int, limit_s: float) -> bytes:
    """Receives so many bytes within so many seconds."""
    data, until_s = bytearray(size), time.monotonic() + limit_s
    at = 0
    while at < size:
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        at += _receive_some(connection, memoryview(data)[at:])
    return bytes(data)


def _received_in_time(connection: socket.socket, size: int) -> bytes:
    _receive_into(connection, memoryview(data := bytearray(size)))
    return bytes(data)


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    at = 0
    while at < len(target):
        at += _receive_some(connection, target[at:])


def _receive_some(connection: socket.socket, target: memoryview) -> int:
    count = connection.recv_into(target)
    if not count:
        raise WorkerFailed("the other node ended the transfer: its offer has changed, or it is gone")
    return count
