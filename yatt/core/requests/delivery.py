"""Requests over a connection that may lose frames: resending, deadlines, duplicates. Pure.

A sender without an answer asks about its request (a *probe* of a few bytes, so that a slow connection is not
slowed down by a large request), and resends the request if the receiver does not have it. The receiver
carries out each request once. It answers a repeated or probed request with "working" and a progress counter
while the request is in progress, and with the same answer again afterwards. Each frame says from which seq on
its sender waits for answers, so that the receiver keeps no others.

A deadline is about progress: it counts the time in which the receiver was silent, or reported the same
progress again, and in which the sender itself ran.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, TypeVar

LATE_S = 0.5
"""Delay of a tick that shows that the process was stopped."""

RECORD_BYTES = 256
"""Memory of the records of one kept answer, beside its frame."""

T = TypeVar("T")


class Due(Enum):
    """The sender's next action for one request."""

    NOTHING = "nothing"
    SEND = "send"
    PROBE = "probe"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One pending request. `quiet_s`: seconds without progress in which the sender itself ran."""

    ticked_s: float
    sent_s: float
    quiet_s: float = 0.0
    is_lost: bool = False
    progress: int = -1


@dataclass(frozen=True, slots=True)
class RequestWatch:
    """Sources of a request's progress, in addition to the receiver's reports.

    Attributes:
        progress: returns the receiver's progress, if it is known in this process.
        moved: called when the receiver reports new progress.
    """

    progress: Callable[[], int] | None = None
    moved: Callable[[], None] | None = None


UNWATCHED = RequestWatch()


def sent_request(now_s: float) -> Outgoing:
    """Returns the state of a request that was just sent for the first time."""
    return Outgoing(ticked_s=now_s, sent_s=now_s)


def tick(
    request: Outgoing, now_s: float, *, planned_s: float, resend_s: float, limit_s: float
) -> tuple[Outgoing, Due]:
    """Handles a tick: returns the next state and the action.

    Args:
        planned_s: planned time between the last tick and this one. A much later tick shows that the sender
            was stopped: messages that arrived meanwhile may be unread, so the request does not expire, and
            only the planned time is counted.
    """
    passed_s = now_s - request.ticked_s
    is_late = passed_s > planned_s + LATE_S
    quiet_s = request.quiet_s + min(passed_s, planned_s)
    request = replace(request, ticked_s=now_s, quiet_s=quiet_s)
    if quiet_s >= limit_s:
        return request, Due.NOTHING if is_late else Due.EXPIRED
    if not resend_s or now_s - request.sent_s < resend_s:
        return request, Due.NOTHING
    return replace(request, sent_s=now_s, is_lost=False), Due.SEND if request.is_lost else Due.PROBE


def seen_working(request: Outgoing, progress: int) -> Outgoing:
    """Handles a report that the request is in progress. The first report counts as progress too."""
    moved = progress != request.progress
    quiet_s = 0.0 if moved else request.quiet_s
    return replace(request, is_lost=False, progress=progress, quiet_s=quiet_s)


def seen_forgotten(request: Outgoing) -> Outgoing:
    """Handles a report that the receiver does not have the request: the whole request has to be resent."""
    return replace(request, is_lost=True)


@dataclass(slots=True)
class DuplicateFilter:
    """Records which sequence numbers of one sender arrived. Numbers rise by one; a skipped number is admitted
    once, until `most_missing` newer ones have arrived."""

    most_missing: int = 65536
    top: int = 0
    missing: set[int] = field(default_factory=set)

    def admits(self, seq: int) -> bool:
        """Whether this number is new; records it. A number that is far ahead counts as damaged."""
        if seq == self.top + 1:  # almost every frame
            self.top = seq
            return True
        if not self.top - self.most_missing < seq <= self.top + self.most_missing:
            return False
        if seq > self.top:
            self.missing.update(range(self.top + 1, seq))
            self.top = seq
            return True
        if seq in self.missing:
            self.missing.discard(seq)
            return True
        return False

    def forget(self, seq: int) -> None:
        """Admits this number once more."""
        self.missing.add(seq)
        if len(self.missing) > 2 * self.most_missing:
            self.missing = {number for number in self.missing if number > self.top - self.most_missing}


class Pending(Generic[T]):
    """A sender's requests without an answer, by receiver and seq. Those to one receiver are added in the
    order of their seqs."""

    def __init__(self) -> None:
        self._by_receiver: dict[str, OrderedDict[int, T]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_receiver)

    def add(self, receiver: str, seq: int, request: T) -> None:
        """Adds a request."""
        self._by_receiver.setdefault(receiver, OrderedDict())[seq] = request

    def remove(self, receiver: str, seq: int) -> None:
        """Removes a request, if it is there: answered, expired or cancelled."""
        requests = self._by_receiver.get(receiver)
        if requests is None:
            return
        requests.pop(seq, None)
        if not requests:
            del self._by_receiver[receiver]

    def get(self, receiver: str, seq: int) -> T | None:
        """Returns this request, or None if it is not pending."""
        requests = self._by_receiver.get(receiver)
        return None if requests is None else requests.get(seq)

    def to(self, receiver: str) -> list[T]:
        """Returns the requests to one receiver."""
        return [*self._by_receiver.get(receiver, OrderedDict[int, T]()).values()]

    def every(self) -> list[T]:
        """Returns all requests."""
        return [request for requests in self._by_receiver.values() for request in requests.values()]

    def oldest(self, receiver: str, newest: int) -> int:
        """Returns the lowest seq of the requests to `receiver`, or `newest` if there is none."""
        return next(iter(self._by_receiver.get(receiver, ())), newest)


class Answers:
    """A receiver's records of requests: those in progress, and answers that their sender may still wait for,
    in case one was lost.

    Args:
        most_bytes: maximum size of the kept answers with their records. The oldest are removed first; a
            request whose answer was removed for room is carried out again, which every order allows.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._working: set[tuple[str, int]] = set()
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._ended: dict[str, deque[int]] = {}
        """Seqs of a sender's kept answers, in the order in which they were given."""

    def begin(self, sender: str, seq: int) -> None:
        """Records that this request is in progress."""
        self._working.add((sender, seq))

    def end(self, sender: str, seq: int, frame: bytes | None) -> list[tuple[str, int]]:
        """Records the answer `frame` (None: no answer is expected); returns the requests it displaces."""
        self._working.discard((sender, seq))
        if frame is None:
            return []
        self._kept[sender, seq] = frame
        self._ended.setdefault(sender, deque()).append(seq)
        self._num_bytes += len(frame) + RECORD_BYTES
        gone = []
        while self._num_bytes > self._most_bytes and self._kept:
            oldest = next(iter(self._kept))[0]
            gone.append((oldest, self._remove_first(oldest)))
        return gone

    def settle(self, sender: str, waits_from: int) -> None:
        """Removes answers that `sender` does not wait for: those to requests below `waits_from`. One that was
        given after an answer which is still kept stays until that one goes."""
        while (ended := self._ended.get(sender)) and ended[0] < waits_from:
            self._remove_first(sender)

    def _remove_first(self, sender: str) -> int:
        """Removes the sender's oldest answer; returns its seq."""
        ended = self._ended[sender]
        seq = ended.popleft()
        self._num_bytes -= len(self._kept.pop((sender, seq))) + RECORD_BYTES
        if not ended:
            del self._ended[sender]
        return seq

    def is_working(self, sender: str, seq: int) -> bool:
        """Whether this request is in progress."""
        return (sender, seq) in self._working

    def answer(self, sender: str, seq: int) -> bytes | None:
        """Returns the answer to this request, or None if it is not kept."""
        return self._kept.get((sender, seq))
