"""Sockets: records in, records out, over ipc inside a node and CURVE-encrypted TCP between nodes.

`Channel` is the asyncio end (a controller's hub for its workers and peers, or its line to one peer); a
worker's end is `yatt.adapters.worker_link`. Every frame carries (attempt, seq): a receiver refuses an attempt
below its own and a seq it has seen from that sender, so a message delivered twice is acted on once and a
stale attempt is not heard. What is no frame is dropped; that and stale frames are counted. A request whose
envelope alone can be read is answered with Failed.

`Channel` reads a plain zmq socket whenever its descriptor says so (adr/0016): a message costs a callback,
not a task.

A request is sent again until it has arrived, and its deadline counts only while nothing moves
(`yatt.core.delivery`). Not promised: delivery of what is merely told.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import zmq

from yatt.adapters.curve import Socket
from yatt.core import delivery
from yatt.core.delivery import Answers, Due, DuplicateFilter, Outgoing
from yatt.errors import DeadlineExceeded, StaleAttempt, words_of
from yatt.printable import printable
from yatt.records import message as m
from yatt.records.codec import (
    PROBE,
    UNKNOWN,
    WORKING,
    decode_body,
    decode_frame,
    decode_progress,
    encode_frame,
    encode_notice,
)

_LOG = logging.getLogger(__name__)
LINGER_MS = 1000
RESEND_S = 3.0
LEAST_S = 0.05
KEPT_BYTES = 32 << 20
"""Of answers, for a request that is asked again because its answer was lost."""

COPIED_BYTES = 64 << 10
"""Larger frames are handed to zmq as they are: a copy of a batch's samples would cost 8 bytes a token."""

MOST_AT_ONCE = 256
"""Messages a channel takes in one turn of the event loop; then others have theirs."""

A = TypeVar("A", bound=m.Message)
Answer = m.Message | None
Handler = Callable[[str, m.Message], Answer | Awaitable[Answer]]
"""Called with sender and message. What it gives at once costs least; else it is awaited in a task."""

ProgressOf = Callable[[str], int]
"""A counter that changes while work gets on."""

_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)


class Fence:
    """Refuses frames of lower attempts and frames seen before."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self._seen: dict[str, DuplicateFilter] = {}

    def is_current(self, sender: str, frame: m.Frame) -> bool:
        """Whether the frame is of this process's attempt.

        Raises:
            StaleAttempt: the sender belongs to a newer attempt, so this process is the stale attempt.
        """
        if frame.attempt > self.attempt:
            raise StaleAttempt(f"{sender} is of attempt {frame.attempt}, this process of {self.attempt}")
        return frame.attempt == self.attempt

    def admits(self, sender: str, frame: m.Frame) -> bool:
        """Whether to act on `frame`; False for a stale attempt or a repeated one.

        Raises:
            StaleAttempt: as `is_current`.
        """
        return self.is_current(sender, frame) and self._seen.setdefault(sender, DuplicateFilter()).admits(
            frame.seq
        )

    def forget(self, sender: str, seq: int) -> None:
        """Admit this frame of the sender once more."""
        self._seen.setdefault(sender, DuplicateFilter()).forget(seq)


@dataclass(frozen=True, slots=True)
class RequestWatch:
    """How the progress of a request is known, besides by what the receiver tells.

    Attributes:
        progress: that of the receiver, where it is known here.
        moved: called when the receiver tells of another progress than before.
    """

    progress: Callable[[], int] | None = None
    moved: Callable[[], None] | None = None


@dataclass(slots=True)
class _Asked:
    """A request under way."""

    future: "asyncio.Future[m.Message]"
    frame: bytes
    state: Outgoing
    limit_s: float
    resend_s: float
    watch: RequestWatch
    planned_s: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Channel:
    """Requests and answers over one socket in the event loop, both ways.

    Args:
        handler: takes messages; without it nothing is read, answers neither, until `serve`.
        peer: who is at the other end of a calling socket; empty for a hub, which has many.
        progress: this process's own, told to whoever (by name) asks whether a request is still worked on.
        resend_s: a request that is not answered is sent again, or asked about, so often; 0 is never, for a
            line that loses nothing.
    """

    def __init__(
        self, socket: Socket, *, attempt: int, handler: Handler | None = None, peer: str = "",
        progress: ProgressOf = lambda _: 0, resend_s: float = RESEND_S,
    ) -> None:  # fmt: skip
        self._socket, self._peer, self._resend_s = socket, peer, resend_s
        self._fence, self._seqs = Fence(attempt), Counter[str]()
        self._asked: dict[tuple[str, int], _Asked] = {}
        self._answers = Answers(KEPT_BYTES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.num_dropped = 0
        """Frames that were none."""
        self.num_stale = 0
        """Frames of a older attempt."""
        if handler is not None:
            self.serve(handler, progress)

    def serve(self, handler: Handler, progress: ProgressOf = lambda _: 0) -> None:
        """Begin to read. What came before waits in the socket."""
        self._handler, self._progress = handler, progress
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)  # the descriptor does not tell of what came before

    async def request(
        self, to: str, body: m.Order[A], deadline_s: float, *, token: int = 0,
        watch: RequestWatch = RequestWatch(), is_probed: bool = False,
    ) -> A | m.Failed:  # fmt: skip
        """Send and wait for the answer.

        Args:
            token: that of the lease that the order is under.
            deadline_s: how long nothing may move: no answer, no word that it is worked on, no progress.
            is_probed: ask the receiver for it also over a line that loses nothing.

        Raises:
            DeadlineExceeded: nothing moved for so long, or nobody is there to ask.
            WorkerFailed: the answer is not one to this order.
            CancelledError: the channel was closed meanwhile.
            Exception: whatever `fail_waiting` was given meanwhile.
        """
        seq = self._next_seq(to)
        frame = encode_frame(self._fence.attempt, seq, 0, body, token=token)
        future: asyncio.Future[m.Message] = self._loop.create_future()
        resend_s = min(RESEND_S, deadline_s / 3) if is_probed else self._resend_s
        state = delivery.sent(self._loop.time())
        asked = _Asked(future, frame, state, deadline_s, resend_s, watch)
        self._asked[to, seq] = asked
        try:
            self._put(to, frame)
            if not resend_s:
                asked.frame = frame = b""  # it is not sent again: a batch's samples need not be kept for it
            self._arm(to, seq, asked)
            return m.as_answer(body, await future, to)
        except (TimeoutError, zmq.ZMQError) as error:
            why = str(error) or "silent"
            raise DeadlineExceeded(
                f"{to} did not answer {type(body).__name__} within {deadline_s:g} s ({why})"
            ) from None
        finally:
            self._asked.pop((to, seq), None)
            if asked.timer is not None:
                asked.timer.cancel()

    async def tell(self, to: str, body: m.Message, *, token: int = 0) -> None:
        """Send without an answer. A receiver that is gone is not an error here."""
        with contextlib.suppress(zmq.ZMQError):
            self._put(to, encode_frame(self._fence.attempt, self._next_seq(to), 0, body, token=token))

    def fail_waiting(self, to: str, error: Exception) -> None:
        """End every request to `to` with `error`: its process is gone."""
        for (owner, _), asked in list(self._asked.items()):
            if owner == to and not asked.future.done():
                asked.future.set_exception(error)

    async def close(self) -> None:
        """Stop reading, cancel handlers and requests under way, close the socket."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
        if not self._ended.cancel() and not self._ended.cancelled():
            self._ended.exception()  # known to whoever awaited `failure`
        for asked in self._asked.values():
            asked.future.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=LINGER_MS)

    async def failure(self) -> None:
        """Return never, or raise what ended the reading (StaleAttempt, a socket that is gone)."""
        await asyncio.shield(self._ended)

    # ---- sending --------------------------------------------------------------------------------

    def _next_seq(self, to: str) -> int:
        self._seqs[to] += 1
        return self._seqs[to]

    def _put(self, to: str, data: bytes) -> None:
        try:
            if not self._peer:
                self._socket.send(to.encode(), _MORE)
            self._socket.send(data, _NOW, copy=len(data) <= COPIED_BYTES)
        finally:
            # Whoever sends may also take note of what has come, and the descriptor tells of that once.
            if not self._socket.closed and int(self._socket.get(zmq.EVENTS)) & _READABLE:
                self._loop.call_soon(self._drain)

    def _arm(self, to: str, seq: int, asked: _Asked) -> None:
        """Look at the request again when it is due to be sent again, or over."""
        left_s = max(LEAST_S, asked.limit_s - asked.state.quiet_s)
        is_watched = asked.resend_s or asked.watch.progress
        asked.planned_s = min(asked.resend_s or RESEND_S, left_s) if is_watched else left_s
        asked.timer = self._loop.call_later(asked.planned_s, self._look, to, seq)

    def _look(self, to: str, seq: int) -> None:
        asked = self._asked.get((to, seq))
        if asked is None or asked.future.done():
            return
        if asked.watch.progress is not None:
            asked.state = delivery.working(asked.state, asked.watch.progress())
        asked.state, due = delivery.tick(
            asked.state, self._loop.time(), planned_s=asked.planned_s, resend_s=asked.resend_s,
            limit_s=asked.limit_s,
        )  # fmt: skip
        if due is Due.EXPIRED:
            asked.future.set_exception(TimeoutError())
            return
        if due is not Due.NOTHING:
            probe = encode_notice(self._fence.attempt, seq, PROBE)
            with contextlib.suppress(zmq.ZMQError):
                self._put(to, asked.frame if due is Due.SEND else probe)
        self._arm(to, seq, asked)

    # ---- receiving ------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Take what has come: all of it, for the descriptor tells only of changes."""
        if self._ended.done():
            return
        try:
            for _ in range(MOST_AT_ONCE):
                self._take(self._socket.recv_multipart(_NOW))
        except zmq.Again:
            return
        except (zmq.ZMQError, StaleAttempt) as error:
            self._loop.remove_reader(self._socket.fileno())
            self._ended.set_exception(error)
            return
        self._loop.call_soon(self._drain)

    def _take(self, parts: list[bytes]) -> None:
        """Act on one frame. What is none costs itself: whoever sent it has the run's keys, or a defect."""
        sender, frame = "", None
        try:
            *identity, data = parts
            sender = self._peer or identity.pop(0).decode()
            if identity:
                raise ValueError(f"{len(parts)} parts")
            frame = decode_frame(data)
            body = decode_body(frame) if frame.reply_to >= 0 else decode_progress(frame)
        except (msgspec.MsgspecError, ValueError, IndexError, RecursionError) as error:
            self._drop(sender, frame, error)
            return
        self.num_stale += frame.attempt < self._fence.attempt
        if isinstance(body, int):
            self._notice(sender, frame, body)
        elif not self._fence.admits(sender, frame):
            self._repeated(sender, frame)
        elif frame.reply_to:
            asked = self._asked.get((sender, frame.reply_to))
            if asked is not None and not asked.future.done():
                asked.future.set_result(body)
        else:
            self._answers.begin(sender, frame.seq)
            # Not here: what a handler raises is not the end of the reading.
            self._loop.call_soon(self._handle, sender, frame.seq, body)

    def _drop(self, sender: str, frame: m.Frame | None, error: Exception) -> None:
        """Count what is no message. A request is answered, or its sender would wait out its deadline. Its
        number is not noted as seen, nor the answer kept: nothing was done, and a sender takes one answer."""
        self.num_dropped += 1
        if self.num_dropped & (self.num_dropped - 1) == 0:  # the first, second, fourth ...
            _LOG.warning("dropped %d frames that are none; the last: %s", self.num_dropped, error)
        if frame is None or frame.attempt != self._fence.attempt or frame.reply_to:
            return
        if not self._seqs[sender]:  # a stranger: to who belongs to the run something was sent before
            return
        failed = m.Failed(error=f"the request is no valid message: {printable(str(error))}")
        with contextlib.suppress(zmq.ZMQError):
            answer = encode_frame(self._fence.attempt, self._next_seq(sender), frame.seq, failed)
            self._put(sender, answer)

    def _notice(self, sender: str, frame: m.Frame, progress: int) -> None:
        """A word about a request: the other end's about one of ours, or its question about one of its own."""
        if not self._fence.is_current(sender, frame):
            return
        if frame.reply_to == PROBE:
            self._say_what_is_known(sender, frame.seq)
            return
        asked = self._asked.get((sender, frame.seq))
        if asked is None:
            return
        if frame.reply_to != WORKING:
            asked.state = delivery.forgotten(asked.state)
            return
        if asked.watch.moved is not None and progress != asked.state.progress:
            asked.watch.moved()
        asked.state = delivery.working(asked.state, progress)

    def _repeated(self, sender: str, frame: m.Frame) -> None:
        if frame.attempt == self._fence.attempt and not frame.reply_to:
            self._say_what_is_known(sender, frame.seq)

    def _say_what_is_known(self, sender: str, seq: int) -> None:
        """Answer a request that comes again, or a probe of it."""
        answer, attempt = self._answers.answer(sender, seq), self._fence.attempt
        if answer is None and self._answers.is_working(sender, seq):
            answer = encode_notice(attempt, seq, WORKING, self._progress(sender))
        with contextlib.suppress(zmq.ZMQError):
            self._put(sender, answer or encode_notice(attempt, seq, UNKNOWN))

    def _handle(self, sender: str, seq: int, body: m.Message) -> None:
        if self._ended.cancelled():
            return
        try:
            answer = self._handler(sender, body)
        except Exception as error:  # noqa: BLE001 - answered, or the asker would wait out its deadline
            answer = _defect(body, error)
        if answer is None or isinstance(answer, m.Message):
            self._answer(sender, seq, answer)
            return
        task = self._loop.create_task(self._answer_later(sender, seq, body, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_later(self, sender: str, seq: int, body: m.Message, answer: Awaitable[Answer]) -> None:
        try:
            given = await answer
        except Exception as error:  # noqa: BLE001 - as in `_handle`
            given = _defect(body, error)
        self._answer(sender, seq, given)

    def _encoded(self, sender: str, seq: int, answer: m.Message) -> bytes:
        """An answer that cannot be encoded (half a character in its text) is a defect, told in its place."""
        number = self._next_seq(sender)
        try:
            return encode_frame(self._fence.attempt, number, seq, answer)
        except Exception as error:  # noqa: BLE001 - or the asker would wait for ever
            return encode_frame(self._fence.attempt, number, seq, _defect(answer, error))

    def _answer(self, sender: str, seq: int, answer: Answer) -> None:
        frame = None
        if answer is not None:
            frame = self._encoded(sender, seq, answer)
            with contextlib.suppress(zmq.ZMQError):
                self._put(sender, frame)
        for gone_sender, gone_seq in self._answers.end(sender, seq, frame if self._resend_s else None):
            self._fence.forget(gone_sender, gone_seq)


def _defect(body: m.Message, error: Exception) -> m.Message:
    _LOG.error("a defect in answering %s", type(body).__name__, exc_info=error)
    return m.Failed(error=f"a defect at {type(body).__name__}: {words_of(error)}")
