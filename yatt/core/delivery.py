"""Requests over a line that may lose frames: when to send again, when to give up, what was seen before. Pure.

A sender that hears nothing asks what became of its request (a *probe*, a few bytes: a slow line is not slowed
down by the request itself, which may be large), and repeats the request when the receiver does not know it.
The receiver acts on each request once: a repeated or probed one is answered with "working" and a progress
counter while it is worked on, and with the same answer again afterwards.

A deadline is about progress: it counts the time in which the receiver was silent, or said the same progress
again and again, as far as the sender itself was awake.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from enum import Enum

LATE_S = 0.5
"""A tick that comes so much after its time shows that the process stood still."""


class Due(Enum):
    """What a sender does about one request now."""

    NOTHING = "nothing"
    SEND = "send"
    PROBE = "probe"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One request under way. `quiet_s`: how long nothing moved, as far as the sender was awake."""

    ticked_s: float
    sent_s: float
    quiet_s: float = 0.0
    is_lost: bool = False
    progress: int = -1


def sent(now_s: float) -> Outgoing:
    """A request that was just sent for the first time."""
    return Outgoing(ticked_s=now_s, sent_s=now_s)


def tick(
    request: Outgoing, now_s: float, *, planned_s: float, resend_s: float, limit_s: float
) -> tuple[Outgoing, Due]:
    """Time passed.

    Args:
        planned_s: when this tick was to come, after the last one. One that comes much later shows that the
            sender stood still: what came meanwhile may be unread, so it ends nothing, and counts no more
            than planned.
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


def working(request: Outgoing, progress: int) -> Outgoing:
    """The receiver works on it. The first word of that is progress too."""
    moved = progress != request.progress
    quiet_s = 0.0 if moved else request.quiet_s
    return replace(request, is_lost=False, progress=progress, quiet_s=quiet_s)


def forgotten(request: Outgoing) -> Outgoing:
    """The receiver knows nothing of it (any more): the whole request has to be sent again."""
    return replace(request, is_lost=True)


@dataclass(slots=True)
class DuplicateFilter:
    """Which numbers of one sender came. Numbers rise by one; what was skipped may still come, once, until
    `most_missing` newer ones have."""

    most_missing: int = 65536
    top: int = 0
    missing: set[int] = field(default_factory=set)

    def admits(self, seq: int) -> bool:
        """Whether this number is new; it is not from now on. One that is far ahead is a damaged one."""
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


class Answers:
    """What a receiver knows of requests: those worked on, and the newest answers, for a sender that lost one.

    Args:
        most_bytes: of answers kept. The oldest go first; a request whose answer is gone is carried out again,
            which every order allows.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._working: set[tuple[str, int]] = set()
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def begin(self, sender: str, seq: int) -> None:
        """This request is worked on."""
        self._working.add((sender, seq))

    def end(self, sender: str, seq: int, frame: bytes | None) -> list[tuple[str, int]]:
        """It was answered by `frame` (None: it wants no answer); gives what has to be forgotten for it."""
        self._working.discard((sender, seq))
        if frame is None:
            return []
        self._kept[sender, seq] = frame
        self._num_bytes += len(frame)
        gone = []
        while self._num_bytes > self._most_bytes and self._kept:
            key, old = self._kept.popitem(last=False)
            self._num_bytes -= len(old)
            gone.append(key)
        return gone

    def is_working(self, sender: str, seq: int) -> bool:
        """Whether this request is worked on now."""
        return (sender, seq) in self._working

    def answer(self, sender: str, seq: int) -> bytes | None:
        """The answer that was given, if it is still kept."""
        return self._kept.get((sender, seq))
