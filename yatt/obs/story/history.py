"""The history of a run, computed from its event log: attempts, phases, leases.

Pure functions of the events; only `read_events` reads a file. Wall-clock times are only for display.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from yatt.adapters.files.segments import SegmentTail
from yatt.core.figures.goodput import AttemptSpan
from yatt.obs.story.spans import AttemptRecord, LeaderClock, SpanFold, attempt_spans, seconds_at
from yatt.obs.story.story import RunStory
from yatt.records.events.attempts import AttemptEnded, AttemptResumed, NodeExcluded, NodeReturned, SignalSeen
from yatt.records.events.event import Event, FrequentEvent
from yatt.records.events.log import LoggedEvent, logged_event
from yatt.records.events.processes import WorkerEnded
from yatt.records.events.slabs import (
    EngineUnfit,
    LeaseExpired,
    LeaseGranted,
    LeaseReleased,
    MemoryNotFree,
    SlabQuarantined,
)

_Timed = tuple[int, float, LoggedEvent]  # attempt, wall seconds, event

_ORDERLY = ("exit code 0", "killed by SIGTERM", "killed by SIGHUP")
_BAD = {LeaseExpired: "lease expired", SlabQuarantined: "quarantined", MemoryNotFree: "memory not free"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSpan:
    """A lease: `holder` had `slab` from grant to release; wall seconds."""

    slab: str
    holder: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A mark on the timeline: an expired lease, a quarantine, a process that died, inputs that changed.

    `slab` is empty if the mark concerns no slab.
    """

    at_s: float
    slab: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One attempt of a run. `exit_code` is None if its end was not recorded."""

    number: int
    span: AttemptSpan
    leases: tuple[LeaseSpan, ...]
    marks: tuple[Mark, ...]
    exit_code: int | None
    reason: str


def read_events(path: Path) -> tuple[list[LoggedEvent], int]:
    """Returns the events of a history, ordered by time, and the number of unreadable lines.

    Frequent events are left out, except the newest one of each attempt: it may be its last sign of life.
    """
    tail, clocks = SegmentTail(path, logged_event), dict[int, LeaderClock]()
    kept, newest = list[_Timed](), dict[int, _Timed]()
    for logged in (logged for batch in tail.batches() for logged in batch):
        attempt = logged.attempt
        timed = (attempt, clocks.setdefault(attempt, LeaderClock()).at_s(logged), logged)
        if not isinstance(logged.event, FrequentEvent):
            kept.append(timed)
        elif not logged.node and (attempt not in newest or newest[attempt][1] <= timed[1]):
            newest[attempt] = timed
    kept = sorted([*kept, *newest.values()], key=lambda each: each[:2])
    return [logged for _, _, logged in kept], tail.unreadable


def attempts_of(
    events: Iterable[LoggedEvent], facts: Mapping[int, AttemptRecord] | None = None
) -> tuple[AttemptView, ...]:
    """Returns every attempt, oldest first.

    Args:
        facts: the recorded facts of attempts by number; an attempt without events is known by these.
    """
    folds: dict[int, _Fold] = {}
    for logged in events:
        folds.setdefault(logged.attempt, _Fold()).take(logged)
    spans = attempt_spans({number: fold.spans for number, fold in folds.items()}, facts or {})
    return tuple(folds.get(number, _Fold()).attempt(number, span) for number, span in spans.items())


def folded_events(events: Iterable[LoggedEvent]) -> tuple[RunStory, tuple[tuple[LoggedEvent, str], ...]]:
    """Returns the run's state after the events, and notable events with their sentences: the news of the
    terminal, signals and failed attempts."""
    story, found = RunStory(), list[tuple[LoggedEvent, str]]()
    for logged in events:
        found += [(logged, sentence) for sentence in story.take(logged)]
        match logged.event:
            case SignalSeen(name=name):
                found.append((logged, f"a signal requested an early end: {name}"))
            case AttemptEnded(exit_code=code, reason=reason) if code:
                found.append((logged, f"attempt {logged.attempt} ended with exit code {code}: {reason}"))
    return story, tuple(found)


@dataclass(slots=True)
class _Fold:
    """Builds one attempt from its events."""

    spans: SpanFold = field(default_factory=SpanFold)
    last_s: float = 0.0
    held: dict[str, LeaseSpan] = field(default_factory=dict)
    leases: list[LeaseSpan] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    exit_code: int | None = None
    reason: str = ""

    def take(self, logged: LoggedEvent) -> None:
        """Adds one event of this attempt."""
        at_s = seconds_at(logged.wall)
        self.last_s = max(self.last_s, at_s)
        self.spans.take(logged)
        match logged.event:
            case AttemptEnded(exit_code=code, reason=reason):
                self.exit_code, self.reason = code, reason
            case LeaseGranted(slab=slab, holder=holder):
                self.held[slab] = LeaseSpan(slab=slab, holder=holder, begin_s=at_s, end_s=at_s)
            case LeaseReleased(slab=slab) if slab in self.held:
                self.leases.append(replace(self.held.pop(slab), end_s=at_s))
            case LeaseExpired() | SlabQuarantined() | MemoryNotFree():
                self._bad(logged.event, at_s)
            case NodeExcluded(node=node):
                self._node(node, at_s)
            case _:
                self._mark(logged.event, at_s)

    def _mark(self, event: Event, at_s: float) -> None:
        match event:
            case EngineUnfit(slab=slab, holder=holder):
                self._say(at_s, f"no engine of {holder} can be built on {slab}", slab)
            case NodeReturned(node=node):
                self._say(at_s, f"node{node} has joined again")
            case WorkerEnded(worker=worker, how=how) if how not in _ORDERLY:
                self._say(at_s, f"{worker} ended: {how}")
            case AttemptResumed(iteration=iteration, changed=changed) if changed:
                self._say(at_s, f"others than at iteration {iteration}: {', '.join(changed)}")

    def _say(self, at_s: float, text: str, slab: str = "") -> None:
        self.marks.append(Mark(at_s=at_s, slab=slab, text=text))

    def attempt(self, number: int, span: AttemptSpan) -> AttemptView:
        """Returns the attempt; anything still open is closed at the last event."""
        held = [replace(lease, end_s=self.last_s) for lease in self.held.values()]
        return AttemptView(
            number=number,
            span=span,
            leases=(*self.leases, *held),
            marks=tuple(self.marks),
            exit_code=self.exit_code,
            reason=self.reason,
        )

    def _node(self, index: int, at_s: float) -> None:
        """Closes the leases of a lost node, which no longer emits events."""
        for slab in [slab for slab in self.held if slab.startswith(f"n{index}s")]:
            self.leases.append(replace(self.held.pop(slab), end_s=at_s))
        self._say(at_s, f"node{index} is lost")

    def _bad(self, event: LeaseExpired | SlabQuarantined | MemoryNotFree, at_s: float) -> None:
        slab = event.slab
        if slab in self.held and not isinstance(event, MemoryNotFree):
            self.leases.append(replace(self.held.pop(slab), end_s=at_s))
        if isinstance(event, SlabQuarantined):
            self.held[slab] = LeaseSpan(slab=slab, holder="quarantined", begin_s=at_s, end_s=at_s)
        self._say(at_s, f"{slab} {_BAD[type(event)]}: {event.cause}", slab)
