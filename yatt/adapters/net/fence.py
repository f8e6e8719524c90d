"""The numbers of frames: what is sent has an attempt and a seq; frames of older attempts, and repeated ones,
are dropped, so that a message delivered twice is handled once."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from yatt.adapters.net.curve import Socket
from yatt.core.requests.delivery import DuplicateFilter, Outgoing, Pending, RequestWatch
from yatt.errors import StaleAttempt
from yatt.records import message as m
from yatt.records.codec import encode_frame

COPIED_BYTES = 64 << 10
"""Larger frames are passed to zmq without a copy, which would cost 8 bytes per token of a batch's samples."""

_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)


class Fence:
    """Refuses frames of lower attempts and repeated frames."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self._seen: dict[str, DuplicateFilter] = {}

    def is_current(self, sender: str, frame: m.Frame) -> bool:
        """Whether the frame is of this process's attempt.

        Raises:
            StaleAttempt: the sender belongs to a newer attempt, so this process is stale.
        """
        if frame.attempt > self.attempt:
            raise StaleAttempt(f"{sender} is of attempt {frame.attempt}, this process of {self.attempt}")
        return frame.attempt == self.attempt

    def admits(self, sender: str, frame: m.Frame) -> bool:
        """Whether to handle `frame`; False for a stale attempt or a repeated frame.

        Raises:
            StaleAttempt: see `is_current`.
        """
        if not self.is_current(sender, frame):
            return False
        seen = self._seen.get(sender)
        if seen is None:  # `setdefault` would create a filter for every frame
            seen = self._seen[sender] = DuplicateFilter()
        return seen.admits(frame.seq)

    def forget(self, sender: str, seq: int) -> None:
        """Allows this frame of the sender once more."""
        self._seen.setdefault(sender, DuplicateFilter()).forget(seq)


@dataclass(slots=True)
class Asked:
    """A pending request."""

    future: "asyncio.Future[m.Message]"
    frame: bytes
    state: Outgoing
    limit_s: float
    resend_s: float
    watch: RequestWatch
    planned_s: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Outbox:
    """Numbers and sends the frames of one socket. Each says from which request on an answer is waited for.

    Args:
        peer: name of the other end of a client socket; empty for a server socket, which has many.
        readable: called when frames may have come.
    """

    def __init__(self, socket: Socket, peer: str, attempt: int, readable: Callable[[], None]) -> None:
        self.socket, self.peer, self._attempt, self._readable = socket, peer, attempt, readable
        self.seqs = Counter[str]()
        self.asked: Pending[Asked] = Pending()

    def encode(
        self, to: str, reply_to: int, body: m.Message | msgspec.Raw, token: int = 0
    ) -> tuple[int, bytes]:
        """Returns a message's seq and its frame."""
        self.seqs[to] += 1
        seq = self.seqs[to]
        oldest = self.asked.oldest(to, seq)
        return seq, encode_frame(self._attempt, seq, reply_to, body, token=token, waits_from=oldest)

    def put(self, to: str, data: bytes) -> None:
        """Sends a frame.

        Raises:
            zmq.ZMQError: it cannot be sent now.
        """
        try:
            if not self.peer:
                self.socket.send(to.encode(), _MORE)
            self.socket.send(data, _NOW, copy=len(data) <= COPIED_BYTES)
        finally:
            # Sending can consume the edge-triggered event, so check for incoming frames afterwards.
            if not self.socket.closed and int(self.socket.get(zmq.EVENTS)) & _READABLE:
                self._readable()
