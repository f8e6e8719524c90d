"""A small key-value service for the rendezvous of ranks, over CURVE with the run's keys.

One process runs the server in a thread; every process is a client. A call that waits for keys is parked at
the server, which answers as soon as all keys exist. ZAP refuses clients without the run's client key before
any of their frames is read. Frames are msgpack records, not pickles.
"""

import contextlib
import itertools
import logging
import math
import os
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import zmq

from yatt.adapters.net.curve import CurveKeys, Gate, Socket, calling_socket, listening_socket, tcp_address
from yatt.clock import monotonic_s
from yatt.errors import DeadlineExceeded, WorkerFailed

_LOG = logging.getLogger(__name__)
POLL_S = 0.05
LONGEST_PARK_S = 1.0
MOST_COUNT = 1 << 63
ANSWER_S = 30.0


class Call(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One operation; `park_s`: the longest wait for all `keys` to exist."""

    number: int
    kind: str
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    park_s: float = 0.0


class KeyValueReply(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """`found`: all keys existed, or the operation was carried out. `error`: why it was refused."""

    number: int
    found: bool
    value: bytes = b""
    count: int = 0
    error: str = ""


_COUNT = re.compile(rb"-?[0-9]{1,19}")
CALLS, REPLIES = msgspec.msgpack.Decoder(Call), msgspec.msgpack.Decoder(KeyValueReply)


class Table:
    """The table of keys and values, and its operations. No I/O."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def has(self, keys: tuple[str, ...]) -> bool:
        """Whether all keys exist."""
        return self._values.keys() >= set(keys)

    def apply(self, call: Call) -> KeyValueReply:
        """Carries out an operation."""
        key = call.keys[0] if call.keys else ""
        found, value, count, error = True, b"", 0, ""
        match call.kind:
            case "set":
                self._values[key] = call.value
            case "get":
                found, value = key in self._values, self._values.get(key, b"")
            case "add":
                count, error = self._add(key, call.amount)
                found = not error
            case "compare_set":
                value = self._compare_set(key, call)
            case "delete":
                found = self._values.pop(key, None) is not None
            case "check":
                found = self.has(call.keys)
            case "count":
                count = len(self._values)
            case _:
                found = False
        return KeyValueReply(number=call.number, found=found, value=value, count=count, error=error)

    def _add(self, key: str, amount: int) -> tuple[int, str]:
        """Returns the new count and ''; or 0 and the error."""
        held = self._values.get(key, b"0")
        if not _COUNT.fullmatch(held):
            return 0, f"'{key}' is not a number, so nothing can be added: {held[:40]!r}"
        count = int(held) + amount
        if not -MOST_COUNT <= count < MOST_COUNT:
            return 0, f"'{key}' would exceed 64 bits: {held.decode()} + {amount}"
        self._values[key] = str(count).encode()
        return count, ""

    def _compare_set(self, key: str, call: Call) -> bytes:
        """Sets by torch's rule: a missing key takes the value if and only if `expected` is empty."""
        held = self._values.get(key)
        if held == call.expected or (held is None and not call.expected):
            self._values[key] = call.value
        return self._values.get(key, call.expected)


@dataclass(frozen=True, slots=True)
class _Parked:
    sender: bytes
    call: Call
    until_s: float


class KeyValueServer:
    """Serves from its construction until `close`.

    Args:
        host: the address to bind, on a free port.
    """

    def __init__(self, host: str, keys: CurveKeys) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._gate = Gate(self._context, keys)
        self._socket = listening_socket(self._context, tcp_address(host, "*"), keys)
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._table, self._parked = Table(), list[_Parked]()
        self.num_dropped = 0
        """Number of invalid frames."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="key-value", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving."""
        self._ends.set()
        self._thread.join()
        self._gate.close()
        self._socket.close(linger=0)
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._ends.is_set():
            if self._socket.poll(int(POLL_S * 1e3)):
                self._take(self._socket.recv_multipart())
            self._answer_parked()

    def _take(self, frames: list[bytes]) -> None:
        """Handles one frame. An invalid one is dropped: its sender has the run's key and a bug."""
        try:
            sender, body = frames
            call = CALLS.decode(body)
            if not math.isfinite(call.park_s):
                raise ValueError(f"park_s is {call.park_s}")
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            self.num_dropped += 1
            if self.num_dropped & (self.num_dropped - 1) == 0:  # the first, second, fourth ...
                _LOG.warning("dropped %d invalid calls; the last: %s", self.num_dropped, error)
            return
        if call.park_s and not self._table.has(call.keys):
            park_s = min(call.park_s, LONGEST_PARK_S)
            self._parked.append(_Parked(sender, call, monotonic_s() + park_s))
        else:
            self._send(sender, call)

    def _answer_parked(self) -> None:
        now_s = monotonic_s()
        parked, self._parked = self._parked, []
        for one in parked:
            if self._table.has(one.call.keys) or now_s >= one.until_s:
                self._send(one.sender, one.call)
            else:
                self._parked.append(one)

    def _send(self, sender: bytes, call: Call) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the caller is gone
            self._socket.send_multipart([sender, msgspec.msgpack.encode(self._table.apply(call))])


class KeyValueClient:
    """A client of the service, for use by several threads. A forked process needs one of its own.

    Each call takes an idle socket or opens one. A socket does not belong to a thread: one that Python did not
    start (NCCL's monitor calls the store once a second) is new to Python in every call.

    Args:
        answer_s: time limit of an answer, in addition to the requested wait.
    """

    def __init__(self, host: str, port: int, keys: CurveKeys, answer_s: float = ANSWER_S) -> None:
        self._address, self._keys, self._answer_s = tcp_address(host, port), keys, answer_s
        self._context: zmq.Context[Socket] = zmq.Context()
        self._idle, self._numbers, self._is_closed = list[Socket](), itertools.count(1), False

    def call(
        self,
        kind: str,
        *keys: str,
        value: bytes = b"",
        expected: bytes = b"",
        amount: int = 0,
        park_s: float = 0.0,
    ) -> KeyValueReply:
        """Sends one operation and waits for its reply.

        Raises:
            ValueError: the service refuses it, for example an addition to a text.
            DeadlineExceeded: the server does not answer; its process has ended, or has other keys.
            WorkerFailed: the client is closed.
        """
        call = Call(
            number=next(self._numbers),
            kind=kind,
            keys=keys,
            value=value,
            expected=expected,
            amount=amount,
            park_s=park_s,
        )
        limit_s = min(park_s, LONGEST_PARK_S) + self._answer_s
        try:
            with self._lent_socket() as socket:
                reply = _answer(socket, call, monotonic_s() + limit_s)
        except zmq.ZMQError as error:
            if not self._is_closed:
                raise
            raise WorkerFailed(f"the key-value client was closed; '{kind}' has no reply") from error
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the key-value service of the first rank at {self._address} did not answer '{kind}' within "
                f"{self._answer_s:g} s. Check that its process runs, and that all nodes see the same keys/."
            ) from error
        if reply.error:
            raise ValueError(reply.error)
        return reply

    def close(self) -> None:
        """Ends active calls, which raise WorkerFailed, and closes all sockets."""
        self._is_closed = True
        self._close_idle()
        self._context.term()  # wakes the active calls, and returns when each has closed its socket

    @contextlib.contextmanager
    def _lent_socket(self) -> Iterator[Socket]:
        """Lends a socket. One whose call did not end is closed: its call may still be queued, and its reply
        may still come."""
        # No lock: `pop` and `append` of a list are atomic, so each socket is lent, or closed, once.
        try:
            socket = self._idle.pop()
        except IndexError:
            identity = f"{os.getpid()}-{secrets.token_hex(6)}"
            socket = calling_socket(self._context, self._address, identity, self._keys)
        try:
            # Now: once `close` has begun it cannot be set any more, and `close` would wait for unsent calls.
            socket.setsockopt(zmq.LINGER, 0)
            yield socket
        except BaseException:
            socket.close()
            raise
        self._idle.append(socket)
        if self._is_closed:  # `close` may have looked for idle sockets before this one came
            self._close_idle()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


def _answer(socket: Socket, call: Call, until_s: float) -> KeyValueReply:
    """Sends a call and returns its reply; TimeoutError if none comes in time."""
    socket.send(msgspec.msgpack.encode(call))
    while (left_s := until_s - monotonic_s()) > 0:
        if socket.poll(int(left_s * 1e3) + 1):
            reply = REPLIES.decode(socket.recv())
            if reply.number == call.number:
                return reply
    raise TimeoutError
