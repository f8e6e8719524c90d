"""Sockets: records in, records out, over ipc inside a node and CURVE-encrypted TCP between nodes.

`Channel` is the asyncio end (a controller's hub for its workers and peers, or its line to one
peer), `WorkerLink` a worker's end (plain blocking calls), `Pulse` a worker's heartbeat thread.
Every frame carries (epoch, seq): a receiver refuses an epoch below its own and a seq it has seen
from that sender, so a message delivered twice is acted on once and a stale attempt is not heard.

`Channel` reads a plain zmq socket whenever its descriptor says so (adr/0016): a message costs a callback,
not a task.

Not promised: delivery. A request that is not answered ends with DeadlineExceeded; repeat it or
give up: every order is safe to repeat.
"""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from yatt.adapters.deadline import within
from yatt.errors import DeadlineExceeded, StaleEpoch
from yatt.records import message as m
from yatt.records.codec import decode_body, decode_frame, encode_frame

LINGER_MS = 1000
MOST_AT_ONCE = 256
"""Messages a channel takes in one turn of the event loop; then others have theirs."""

Answer = m.Message | None
Handler = Callable[[str, m.Message], Answer | Awaitable[Answer]]
"""Called with sender and message. What it gives at once costs least; else it is awaited in a task."""

Socket = zmq.Socket[bytes]
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)


class Fence:
    """Refuses frames of lower epochs and frames seen before."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._last_seq: dict[str, int] = {}

    def admits(self, sender: str, frame: m.Frame) -> bool:
        """Whether to act on `frame`; False for a stale epoch or a repeated one.

        Raises:
            StaleEpoch: the sender belongs to a newer attempt, so this process is the ghost.
        """
        if frame.epoch > self.epoch:
            raise StaleEpoch(f"{sender} is of epoch {frame.epoch}, this process of {self.epoch}")
        if frame.epoch < self.epoch or frame.seq <= self._last_seq.get(sender, 0):
            return False
        self._last_seq[sender] = frame.seq
        return True


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Where one run's CURVE keys are; secret files have mode 0600."""

    folder: Path

    def secret(self, end: str) -> Path:
        """Path of the secret key of `end`, 'server' or 'client'."""
        return self.folder / f"{end}.key_secret"


def make_keys(folder: Path) -> CurveKeys:
    """Create the run's two key pairs in `folder` (mode 0700) unless they are there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    keys = CurveKeys(folder)
    for end in ("server", "client"):
        if not keys.secret(end).exists():
            zmq.auth.create_certificates(folder, end)
        keys.secret(end).chmod(0o600)
    return keys


def listening_socket(context: zmq.Context[Socket], address: str, keys: CurveKeys | None = None) -> Socket:
    """A hub's socket, bound. TCP needs `keys`.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _never_block(socket)
    assert keys is not None or address.startswith("ipc://"), "TCP only with CURVE"
    if keys is not None:
        public, secret = zmq.auth.load_certificate(keys.secret("server"))
        assert secret is not None, "the secret file holds the secret key"
        socket.curve_secretkey, socket.curve_publickey, socket.curve_server = secret, public, True
    socket.bind(address)
    return socket


def calling_socket(
    context: zmq.Context[Socket], address: str, identity: str, keys: CurveKeys | None = None
) -> Socket:
    """A line to a hub: a peer's, or an asyncio worker's own controller. TCP needs `keys`."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    _never_block(socket)
    assert keys is not None or address.startswith("ipc://"), "TCP only with CURVE"
    if keys is not None:
        server_public, _ = zmq.auth.load_certificate(keys.secret("server"))
        public, secret = zmq.auth.load_certificate(keys.secret("client"))
        assert secret is not None, "the secret file holds the secret key"
        socket.curve_serverkey = server_public
        socket.curve_secretkey, socket.curve_publickey = secret, public
    socket.connect(address)
    return socket


def _never_block(socket: Socket) -> None:
    """No limit on queued messages: one peer that stands still must not stop what is said to the others.

    What can be queued is bounded by the requests under way.
    """
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class Channel:
    """Requests and answers over one socket in the event loop, both ways.

    Args:
        peer: who is at the other end of a calling socket; empty for a hub, which has many.
    """

    def __init__(self, socket: Socket, *, epoch: int, handler: Handler, peer: str = "") -> None:
        self._socket, self._peer, self._handler = socket, peer, handler
        self._fence, self._seq = Fence(epoch), itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[m.Message]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)  # what came before is not told of again

    async def request(self, to: str, body: m.Message, deadline_s: float) -> m.Message:
        """Send and wait for the answer.

        Raises:
            DeadlineExceeded: no answer in time, or nobody there to ask.
            CancelledError: the channel was closed meanwhile.
            Exception: whatever `fail_waiting` was given meanwhile.
        """
        seq = next(self._seq)
        future: asyncio.Future[m.Message] = self._loop.create_future()
        self._waiting[seq] = (to, future)
        try:
            self._put(to, seq, 0, body)
            return await within(future, deadline_s)
        except (TimeoutError, zmq.ZMQError) as error:
            why = str(error) or "silent"
            raise DeadlineExceeded(
                f"{to} did not answer {type(body).__name__} within {deadline_s:g} s ({why})"
            ) from None
        finally:
            self._waiting.pop(seq, None)

    async def tell(self, to: str, body: m.Message) -> None:
        """Send without an answer. A receiver that is gone is not an error here."""
        with contextlib.suppress(zmq.ZMQError):
            self._put(to, next(self._seq), 0, body)

    def fail_waiting(self, to: str, error: Exception) -> None:
        """End every request to `to` with `error`: its process is gone."""
        for owner, future in list(self._waiting.values()):
            if owner == to and not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        """Stop reading, cancel handlers and requests under way, close the socket."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
        if not self._ended.cancel() and not self._ended.cancelled():
            self._ended.exception()  # known to whoever awaited `failure`
        for _, future in self._waiting.values():
            future.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=LINGER_MS)

    async def failure(self) -> None:
        """Return never, or raise what ended the reading (StaleEpoch, a frame that is none)."""
        await asyncio.shield(self._ended)

    def _put(self, to: str, seq: int, reply_to: int, body: m.Message) -> None:
        data = encode_frame(self._fence.epoch, seq, reply_to, body)
        try:
            if not self._peer:
                self._socket.send(to.encode(), _MORE)
            self._socket.send(data, _NOW)
        finally:
            # Whoever sends may also take note of what has come, and the descriptor tells of that once.
            if not self._socket.closed and int(self._socket.get(zmq.EVENTS)) & _READABLE:
                self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Take what has come: all of it, for the descriptor tells only of changes."""
        if self._ended.done():
            return
        try:
            for _ in range(MOST_AT_ONCE):
                self._take(self._socket.recv_multipart(_NOW))
        except zmq.Again:
            return
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits `failure`
            self._loop.remove_reader(self._socket.fileno())
            self._ended.set_exception(error)
            return
        self._loop.call_soon(self._drain)

    def _take(self, parts: list[bytes]) -> None:
        sender = self._peer or parts[0].decode()
        frame = decode_frame(parts[-1])
        if not self._fence.admits(sender, frame):
            return
        body = decode_body(frame)
        if not frame.reply_to:
            # Not here: what a handler raises is not the end of the reading.
            self._loop.call_soon(self._handle, sender, frame.seq, body)
            return
        _, future = self._waiting.get(frame.reply_to, ("", None))
        if future is not None and not future.done():
            future.set_result(body)

    def _handle(self, sender: str, seq: int, body: m.Message) -> None:
        if self._ended.cancelled():
            return
        answer = self._handler(sender, body)
        if answer is None or isinstance(answer, m.Message):
            self._answer(sender, seq, answer)
            return
        task = self._loop.create_task(self._answer_later(sender, seq, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_later(self, sender: str, seq: int, answer: Awaitable[Answer]) -> None:
        self._answer(sender, seq, await answer)

    def _answer(self, sender: str, seq: int, answer: Answer) -> None:
        if answer is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._put(sender, next(self._seq), seq, answer)


@dataclass(frozen=True, slots=True)
class Order:
    """A message from the controller, with the seq an answer refers to."""

    seq: int
    body: m.Message


class WorkerLink:
    """A worker's line to its controller: blocking, one thread.

    Args:
        endpoint: the controller's ``ipc://`` address.
        worker: this worker's name, unique to this start of it.
    """

    def __init__(self, endpoint: str, *, worker: str, epoch: int) -> None:
        self._context = zmq.Context()
        self._socket: Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, worker.encode())
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(endpoint)
        self._fence, self._seq = Fence(epoch), itertools.count(1)
        self.turns = 0
        """How often the main loop came by: the progress the heartbeat reports."""

    def receive(self, wait_s: float) -> Order | None:
        """The next order, or None after `wait_s`."""
        self.turns += 1
        if not self._socket.poll(int(wait_s * 1000)):
            return None
        frame = decode_frame(self._socket.recv())
        if not self._fence.admits("controller", frame):
            return None
        return Order(frame.seq, decode_body(frame))

    def send(self, body: m.Message, reply_to: int = 0) -> None:
        """Send a message, or the answer to the order with that seq."""
        self._socket.send(encode_frame(self._fence.epoch, next(self._seq), reply_to, body))

    def close(self) -> None:
        """Flush for `LINGER_MS` at most, and close: what was sent arrives also if the process ends now."""
        self._socket.close()
        self._context.term()


class Pulse(threading.Thread):
    """Renews the lease from a thread of its own, so that a long computation does not lose it.

    A stopped process stops this thread too: then the lease runs out, which is what it is for.

    Args:
        beat: called each time; gives the token held now (0: none) and the progress counter.
    """

    def __init__(
        self, endpoint: str, *, worker: str, epoch: int, renew_s: float, beat: Callable[[], tuple[int, int]]
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self._endpoint, self._worker, self._epoch = endpoint, worker, epoch
        self._renew_s, self._beat = renew_s, beat
        self._ended = threading.Event()

    def run(self) -> None:
        """Send a Renew every `renew_s` while a token is held."""
        link = WorkerLink(self._endpoint, worker=f"{self._worker}/pulse", epoch=self._epoch)
        while not self._ended.wait(self._renew_s):
            token, progress = self._beat()
            if token:
                link.send(m.Renew(worker=self._worker, token=token, progress=progress))
        link.close()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._ended.set()
        self.join(timeout=self._renew_s + 1)
