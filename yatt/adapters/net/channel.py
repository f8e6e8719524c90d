"""Sends and receives records over sockets: ipc inside a node and CURVE-encrypted TCP between nodes.

`Channel` is the asyncio end: a controller's server socket for its workers and peers, or its connection to a
peer. A worker's end is `yatt.adapters.net.worker_link`. Every frame passes the fence
(`yatt.adapters.net.fence`). Invalid and stale frames are dropped and counted. A request of which only the
envelope can be read is answered with Failed.

`Channel` reads a plain zmq socket when its descriptor is readable (adr/0016): a message costs a callback, not
a task.

A request is resent until it has arrived, and its deadline counts only time without progress
(`yatt.core.requests.delivery`). Messages without an answer (`tell`) may be lost.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import zmq

from yatt.adapters.net.crowd import Spawned
from yatt.adapters.net.curve import Socket, receive_now
from yatt.adapters.net.fence import Asked, Fence, Outbox
from yatt.adapters.net.paced_reader import PacedReader
from yatt.core.requests import delivery
from yatt.core.requests.delivery import UNWATCHED, Answers, Due, RequestWatch
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
    encode_notice,
)

_LOG = logging.getLogger(__name__)
LINGER_MS = 1000
RESEND_S = 3.0
LEAST_S = 0.05
KEPT_BYTES = 32 << 20
"""Maximum size of kept answers, for requests that are sent again because the answer was lost."""

MOST_AT_ONCE = 256
"""Maximum number of messages that a channel handles per turn of the event loop."""

A = TypeVar("A", bound=m.Message)
Answer = m.Message | None
Handler = Callable[[str, m.Message], Answer | Awaitable[Answer]]
"""Called with sender and message. An immediate result is cheapest; an awaitable runs in a task."""

ProgressOf = Callable[[str], int]
"""A counter that changes while work makes progress."""


class _Inbox:
    """The messages that were read, until they are handled: one callback handles many.

    Args:
        ended: done when the channel reads no more; cancelled when it is closed.
        answer: sends an answer: (sender, seq, answer).
    """

    def __init__(self, ended: "asyncio.Future[None]", answer: Callable[[str, int, Answer], None]) -> None:
        self._ended, self._answer, self.tasks = ended, answer, Spawned()
        self.arrived: list[tuple[str, int, m.Message]] = []
        self.num_passed = 0  # callbacks that have not run

    def serve(self, handler: Handler, progress: ProgressOf) -> None:
        """Sets what handles the messages."""
        self._handler, self.progress = handler, progress

    def pass_on(self, *, at_once: bool) -> None:
        """Has the messages that were read handled, at once or in the next turn of the loop."""
        if not self.arrived:
            return
        arrived, self.arrived = self.arrived, []
        self.num_passed += 1
        if at_once:
            self._handle_all(arrived)
        else:
            asyncio.get_running_loop().call_soon(self._handle_all, arrived)

    def _handle_all(self, arrived: list[tuple[str, int, m.Message]]) -> None:
        self.num_passed -= 1
        for sender, seq, body in arrived:
            self._handle(sender, seq, body)

    def _handle(self, sender: str, seq: int, body: m.Message) -> None:
        if self._ended.cancelled():
            return
        try:
            answer = self._handler(sender, body)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - answered, or the sender waits
            answer = _defect(body, error)
        if answer is None or isinstance(answer, m.Message):
            self._answer(sender, seq, answer)
            return
        self.tasks.spawn(self._answer_later(sender, seq, body, answer))

    async def _answer_later(self, sender: str, seq: int, body: m.Message, answer: Awaitable[Answer]) -> None:
        try:
            given = await answer
        except Exception as error:  # noqa: BLE001 - as in `_handle`
            given = _defect(body, error)
        self._answer(sender, seq, given)


class Channel:
    """Sends and answers requests over one socket in the event loop.

    Args:
        handler: takes messages; without it nothing is read, answers neither, until `serve`.
        peer: name of the other end of a client socket; empty for a server socket, which has many.
        progress: returns this process's progress on the requests of a sender, which may ask for it.
        resend_s: interval for resending an unanswered request, or asking about it; 0: never, for a reliable
            connection.
    """

    def __init__(
        self, socket: Socket, *, attempt: int, handler: Handler | None = None, peer: str = "",
        progress: ProgressOf = lambda _: 0, resend_s: float = RESEND_S,
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._reader: PacedReader | None = None
        self._fence, self._answers, self._resend_s = Fence(attempt), Answers(KEPT_BYTES), resend_s
        self._out = Outbox(socket, peer, attempt, self._read_soon)
        self._in = _Inbox(self._ended, self._answer)
        self.num_dropped = 0
        """Number of invalid frames."""
        self.num_stale = 0
        """Number of frames of an older attempt."""
        if handler is not None:
            self.serve(handler, progress)

    def serve(self, handler: Handler, progress: ProgressOf = lambda _: 0, *, pause_s: float = 0.0) -> None:
        """Begins to read. Earlier messages wait in the socket. `pause_s`: see `PacedReader`."""
        self._in.serve(handler, progress)
        self._reader = PacedReader(self._out.socket.fileno(), self._drain, pause_s)
        self._read_soon()  # the descriptor does not signal earlier messages again

    async def request(
        self, to: str, body: m.Order[A], deadline_s: float, *, token: int = 0,
        watch: RequestWatch = UNWATCHED, is_probed: bool = False,
    ) -> A | m.Failed:  # fmt: skip
        """Sends a request and waits for the answer.

        Args:
            token: token of the lease for the order.
            deadline_s: longest time without an answer, a report or progress.
            is_probed: ask the receiver about it also over a reliable connection.

        Raises:
            DeadlineExceeded: no progress for that long, or the receiver does not exist.
            CancelledError: the channel was closed meanwhile.
            Exception: the error given to `fail_waiting` meanwhile.
        """
        seq, frame = self._out.encode(to, 0, body, token)
        future: asyncio.Future[m.Message] = self._loop.create_future()
        resend_s = min(RESEND_S, deadline_s / 3) if is_probed else self._resend_s
        state = delivery.sent_request(self._loop.time())
        asked = Asked(future, frame, state, deadline_s, resend_s, watch)
        self._out.asked.add(to, seq, asked)
        try:
            self._out.put(to, frame)
            if not resend_s:
                asked.frame = frame = b""  # never resent, so do not keep a batch's samples in memory
            self._arm(to, seq, asked)
            return m.as_answer(body, await future, to)
        except (TimeoutError, zmq.ZMQError) as error:
            why = str(error) or "silent"
            raise DeadlineExceeded(
                f"{to} did not answer {type(body).__name__} within {deadline_s:g} s ({why})"
            ) from None
        finally:
            self._out.asked.remove(to, seq)
            if asked.timer is not None:
                asked.timer.cancel()

    async def tell(self, to: str, body: m.Message, *, token: int = 0) -> None:
        """Sends a message without an answer. A missing receiver is not an error here."""
        self.send(to, body, token=token)

    def send(self, to: str, body: m.Message | msgspec.Raw, *, token: int = 0) -> None:
        """Does the same as `tell`; also with a message that was encoded once for several receivers."""
        with contextlib.suppress(zmq.ZMQError):
            self._out.put(to, self._out.encode(to, 0, body, token)[1])

    def fail_waiting(self, to: str, error: Exception) -> None:
        """Ends every request to `to` with `error`, because its process has ended."""
        for asked in self._out.asked.to(to):
            if not asked.future.done():
                asked.future.set_exception(error)

    async def close(self) -> None:
        """Stops reading, cancels handlers and pending requests, closes the socket."""
        if self._reader is not None:
            self._reader.close()
        if not self._ended.cancel() and not self._ended.cancelled():
            self._ended.exception()  # retrieved, so that asyncio does not log it
        for asked in self._out.asked.every():
            asked.future.cancel()
        await self._in.tasks.end()
        self._out.socket.close(linger=LINGER_MS)

    async def failure(self) -> None:
        """Never returns; raises the error that ended the reading (StaleAttempt, a closed socket)."""
        await asyncio.shield(self._ended)

    # ---- sending --------------------------------------------------------------------------------

    def _arm(self, to: str, seq: int, asked: Asked) -> None:
        """Schedules the next check of the request: resend, or deadline."""
        left_s = max(LEAST_S, asked.limit_s - asked.state.quiet_s)
        is_watched = asked.resend_s or asked.watch.progress
        asked.planned_s = min(asked.resend_s or RESEND_S, left_s) if is_watched else left_s
        asked.timer = self._loop.call_later(asked.planned_s, self._look, to, seq)

    def _look(self, to: str, seq: int) -> None:
        asked = self._out.asked.get(to, seq)
        if asked is None or asked.future.done():
            return
        if asked.watch.progress is not None:
            asked.state = delivery.seen_working(asked.state, asked.watch.progress())
        asked.state, due = delivery.tick(
            asked.state,
            self._loop.time(),
            planned_s=asked.planned_s,
            resend_s=asked.resend_s,
            limit_s=asked.limit_s,
        )
        if due is Due.EXPIRED:
            asked.future.set_exception(TimeoutError())
            return
        if due is not Due.NOTHING:
            probe = encode_notice(self._fence.attempt, seq, PROBE)
            with contextlib.suppress(zmq.ZMQError):
                self._out.put(to, asked.frame if due is Due.SEND else probe)
        self._arm(to, seq, asked)

    def _read_soon(self) -> None:
        self._loop.call_soon(self._drain)

    # ---- receiving ------------------------------------------------------------------------------

    def _drain(self) -> bool:
        """Reads all messages, because the descriptor signals only changes; returns whether one was there."""
        if self._ended.done():
            return False
        num_read, out = 0, self._out
        try:
            for _ in range(MOST_AT_ONCE):
                self._take(*receive_now(out.socket, is_server=not out.peer))
                num_read += 1
            self._read_soon()
        except zmq.Again:
            pass
        except (zmq.ZMQError, StaleAttempt) as error:
            assert self._reader is not None, "it reads"
            self._reader.close()
            self._ended.set_exception(error)
        # A task that waits for an answer which was read goes on before later messages are handled.
        self._in.pass_on(at_once=not out.asked and not self._in.num_passed)
        return num_read > 0

    def _take(self, identity: bytes, data: bytes, num_more: int) -> None:
        """Handles one frame. An invalid one is only dropped: its sender has the run's keys, and a bug."""
        sender, frame = "", None
        try:
            sender = self._out.peer or identity.decode()
            if num_more:
                raise ValueError(f"{num_more} parts too many")
            frame = decode_frame(data)
            body = decode_body(frame) if frame.reply_to >= 0 else decode_progress(frame)
        except (msgspec.MsgspecError, ValueError, IndexError, RecursionError) as error:
            self._drop(sender, frame, error)
            return
        self.num_stale += frame.attempt < self._fence.attempt
        if isinstance(body, int):
            self._notice(sender, frame, body)
            return
        if not self._fence.admits(sender, frame):
            self._repeated(sender, frame)
            return
        self._answers.settle(sender, frame.waits_from)
        if frame.reply_to:
            asked = self._out.asked.get(sender, frame.reply_to)
            if asked is not None and not asked.future.done():
                self._in.pass_on(at_once=False)
                asked.future.set_result(body)
        else:
            self._answers.begin(sender, frame.seq)
            self._in.arrived.append((sender, frame.seq, body))

    def _drop(self, sender: str, frame: m.Frame | None, error: Exception) -> None:
        """Counts an invalid frame. A request is answered, or its sender would wait for its deadline. Its seq
        is not recorded as seen, nor the answer kept: nothing was done, and a sender takes one answer."""
        self.num_dropped += 1
        if self.num_dropped & (self.num_dropped - 1) == 0:  # the first, second, fourth ...
            _LOG.warning("dropped %d invalid frames; the last: %s", self.num_dropped, error)
        if frame is None or frame.attempt != self._fence.attempt or frame.reply_to:
            return
        if not self._out.seqs[sender]:  # unknown sender: every process of the run was sent something before
            return
        failed = m.Failed(error=f"the request is not a valid message: {printable(str(error))}")
        with contextlib.suppress(zmq.ZMQError):
            self._out.put(sender, self._out.encode(sender, frame.seq, failed)[1])

    def _notice(self, sender: str, frame: m.Frame, progress: int) -> None:
        """Handles a notice: the receiver's report on our request, or a sender's query about its own."""
        if not self._fence.is_current(sender, frame):
            return
        if frame.reply_to == PROBE:
            self._say_what_is_known(sender, frame.seq)
            return
        asked = self._out.asked.get(sender, frame.seq)
        if asked is None:
            return
        if frame.reply_to != WORKING:
            asked.state = delivery.seen_forgotten(asked.state)
            return
        if asked.watch.moved is not None and progress != asked.state.progress:
            asked.watch.moved()
        asked.state = delivery.seen_working(asked.state, progress)

    def _repeated(self, sender: str, frame: m.Frame) -> None:
        if frame.attempt == self._fence.attempt and not frame.reply_to:
            self._say_what_is_known(sender, frame.seq)

    def _say_what_is_known(self, sender: str, seq: int) -> None:
        """Answers a repeated request, or a query about it."""
        answer, attempt = self._answers.answer(sender, seq), self._fence.attempt
        if answer is None and self._answers.is_working(sender, seq):
            answer = encode_notice(attempt, seq, WORKING, self._in.progress(sender))
        with contextlib.suppress(zmq.ZMQError):
            self._out.put(sender, answer or encode_notice(attempt, seq, UNKNOWN))

    def _encoded(self, sender: str, seq: int, answer: m.Message) -> bytes:
        """Encodes an answer; replaces one that cannot be encoded (a lone surrogate) by an error."""
        try:
            return self._out.encode(sender, seq, answer)[1]
        except Exception as error:  # noqa: BLE001 - or the sender would wait forever
            return self._out.encode(sender, seq, _defect(answer, error))[1]

    def _answer(self, sender: str, seq: int, answer: Answer) -> None:
        frame = None
        if answer is not None:
            frame = self._encoded(sender, seq, answer)
            with contextlib.suppress(zmq.ZMQError):
                self._out.put(sender, frame)
        for gone_sender, gone_seq in self._answers.end(sender, seq, frame if self._resend_s else None):
            self._fence.forget(gone_sender, gone_seq)


def _defect(body: m.Message, error: BaseException) -> m.Message:
    _LOG.error("a defect in answering %s", type(body).__name__, exc_info=error)
    return m.Failed(error=f"a defect at {type(body).__name__}: {words_of(error)}")
