"""A worker's end of the connection to its controller: blocking calls, fencing, heartbeat thread.

Two numbers fence a worker off. A frame of another attempt is dropped (`yatt.adapters.net.fence`). An
order under a lease is refused if its token is out of date, or if the worker sleeps
(`yatt.core.gpus.lease.WorkerLease`). Both are checked here, once, for every kind of worker.
"""

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from yatt.adapters.net.channel import LINGER_MS
from yatt.adapters.net.curve import Socket
from yatt.adapters.net.fence import Fence
from yatt.core.gpus.lease import WorkerLease
from yatt.records import message as m
from yatt.records.codec import decode_body, decode_frame, encode_frame

_LOG = logging.getLogger(__name__)
MOST_SAID = 500
"""Maximum length of an error text in a heartbeat."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message from the controller, with its lease token and the seq to which an answer refers."""

    seq: int
    token: int
    body: m.Message


class WorkerLink:
    """A worker's connection to its controller: blocking, for one thread.

    Args:
        endpoint: the controller's ``ipc://`` address.
        worker: this worker's name, unique per start of the worker.
    """

    def __init__(self, endpoint: str, *, worker: str, attempt: int) -> None:
        self._context = zmq.Context()
        self._socket: Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, worker.encode())
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(endpoint)
        self._fence, self._seq = Fence(attempt), itertools.count(1)
        self.lease = WorkerLease()
        """The lease state of this worker."""

        self.turns = 0
        """Number of turns of the main loop, which show that it is alive."""

        self.work = 0
        """Number of work units: orders, turns of an engine with requests, ticks."""

        self.waits_for = ""
        """The error of a checkpoint store for which the main loop waits; reported by the heartbeat."""

    def receive(self, wait_s: float) -> Received | None:
        """Returns the next order, or None after `wait_s`."""
        self.turns += 1
        if not self._socket.poll(int(wait_s * 1000)):
            return None
        try:
            (data,) = self._socket.recv_multipart()
            frame = decode_frame(data)
            body = decode_body(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            _LOG.warning("dropped an invalid frame of the controller: %s", error)
            return None
        if not self._fence.admits("controller", frame):
            return None
        self.work += 1
        return Received(frame.seq, frame.token, body)

    def carry_out(
        self,
        order: Received,
        do: Callable[[m.Message], m.Message | None],
        failed: Callable[[m.Message, Exception], m.Message],
    ) -> m.Message | None:
        """Carries out one order, if the lease allows it.

        Args:
            do: returns the answer.
            failed: returns the answer for an order that was refused or raised an error.
        """
        try:
            return self._fenced(order, do)
        except Exception as error:  # noqa: BLE001 (reported: the controller decides whether to keep this worker)
            _LOG.exception("order %s failed", type(order.body).__name__)
            return failed(order.body, error)

    def _fenced(self, order: Received, do: Callable[[m.Message], m.Message | None]) -> m.Message | None:
        if not order.body.under_lease:
            return do(order.body)
        self.lease = self.lease.seen(order.token)
        if isinstance(order.body, m.Wake):
            self.lease = self.lease.awake()  # before the work: the heartbeat renews the lease meanwhile
            try:
                return do(order.body)
            except BaseException:
                self.lease = self.lease.asleep()
                raise
        if not isinstance(order.body, m.Sleep):
            self.lease.check_awake()
            return do(order.body)
        answer = do(order.body)
        self.lease = self.lease.asleep()
        return answer

    def send(self, body: m.Message, reply_to: int = 0) -> None:
        """Sends a message, or the answer to the order with seq `reply_to`."""
        self._socket.send(encode_frame(self._fence.attempt, next(self._seq), reply_to, body))

    def close(self) -> None:
        """Flushes for at most `LINGER_MS`, then closes: sent messages arrive even if the process ends now."""
        self._socket.close()
        self._context.term()


class Heartbeat(threading.Thread):
    """The heartbeat: renews the lease in a separate thread, so that a long computation does not lose it.

    If the process is stopped, this thread stops too, and the lease expires, as intended.

    Args:
        beat: called each time; returns the message to send.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        worker: str,
        attempt: int,
        renew_s: float,
        beat: Callable[[], m.Renew],
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._endpoint, self._worker, self._attempt = endpoint, worker, attempt
        self._renew_s, self._beat = renew_s, beat
        self._ended = threading.Event()

    def run(self) -> None:
        """Sends a Renew every `renew_s` while a token is held, and one when a wait is over."""
        link = WorkerLink(self._endpoint, worker=f"{self._worker}/heartbeat", attempt=self._attempt)
        told = ""
        while not self._ended.wait(self._renew_s):
            renew = self._beat()
            if renew.token or told:
                told = renew.waits_for[:MOST_SAID]
                link.send(msgspec.structs.replace(renew, waits_for=told))
        link.close()

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        self._ended.set()
        self.join(timeout=self._renew_s + 1)
