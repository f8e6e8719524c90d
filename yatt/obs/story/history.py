"""The history of a run, computed from its event log: attempts, phases, leases.

Pure functions of the events; only `read_events` reads a file. Wall-clock times are only for display.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from yatt.adapters.files.segments import SegmentTail
from yatt.core.figures.goodput import AttemptSpan
from yatt.obs.story.events import as_event, inputs_said_changed
from yatt.obs.story.spans import AttemptRecord, LeaderClock, SpanFold, attempt_spans, seconds_at
from yatt.obs.story.view import RunView
from yatt.paths import RunPaths

Event = dict[str, Any]
_Timed = tuple[int, float, Event]  # attempt, wall seconds, event

_PREFIXES = (
    "attempt.",
    "phase.",
    "batch.",
    "lease.",
    "worker.",
    "ckpt.",
    "node.",
    "signal",
    "failure.report",
    "split.",
    "slab.",
    "engine.",
    "alarm.",
    "telemetry.",
    "reward.kill",
    "media.",
)
_BAD = {
    "lease.expire": "lease expired", "lease.quarantine": "quarantined", "lease.not_free": "memory not free"
}  # fmt: skip
_GIVEN_UP = ("lease.release", "lease.expire", "lease.quarantine")


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


def read_events(path: Path) -> tuple[list[Event], int]:
    """Returns the events of a history, ordered by time, and the number of unreadable lines.

    Events of sampling are left out, except the newest one of each attempt: it may be its last sign of life.
    """
    tail, clocks = SegmentTail(path, as_event), dict[int, LeaderClock]()
    kept, newest = list[_Timed](), dict[int, _Timed]()
    for event in (event for batch in tail.batches() for event in batch):
        attempt = event["attempt"]
        timed = (attempt, clocks.setdefault(attempt, LeaderClock()).at_s(event), event)
        if event["kind"].startswith(_PREFIXES):
            kept.append(timed)
        elif not event.get("node", 0) and (attempt not in newest or newest[attempt][1] <= timed[1]):
            newest[attempt] = timed
    kept = sorted([*kept, *newest.values()], key=lambda each: each[:2])
    return [event for _, _, event in kept], tail.unreadable


def attempts_of(
    events: Iterable[Event], facts: Mapping[int, AttemptRecord] | None = None
) -> tuple[AttemptView, ...]:
    """Returns every attempt, oldest first.

    Args:
        facts: the recorded facts of attempts by number; an attempt without events is known by these.
    """
    folds: dict[int, _Fold] = {}
    for event in events:
        folds.setdefault(event["attempt"], _Fold()).take(event)
    spans = attempt_spans({number: fold.spans for number, fold in folds.items()}, facts or {})
    return tuple(folds.get(number, _Fold()).attempt(number, span) for number, span in spans.items())


def folded_events(events: Iterable[Event], paths: RunPaths) -> tuple[RunView, tuple[tuple[Event, str], ...]]:
    """Returns the run's state after the events, and notable events with their sentences: the news of the
    terminal, signals and failed attempts."""
    view, found = RunView(paths, 0), []
    for event in events:
        view.fold(event)
        found += [(event, sentence) for sentence in view.news]
        view.news = []
        if event["kind"] == "signal":
            found.append((event, f"a signal requested an early end: {event['name']}"))
        elif event["kind"] == "attempt.end" and event["exit_code"]:
            how = f"ended with exit code {event['exit_code']}: {event['reason']}"
            found.append((event, f"attempt {event['attempt']} {how}"))
    return view, tuple(found)


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

    def take(self, event: Event) -> None:
        """Adds one event of this attempt."""
        at_s, kind = seconds_at(event["wall"]), event["kind"]
        self.last_s = max(self.last_s, at_s)
        self.spans.take(event)
        if kind.startswith("lease."):
            self._lease(kind, event, at_s)
        elif kind == "node.lost":
            self._node(event["node"], at_s)
        elif kind == "engine.unfit":
            text = f"no engine of {event['holder']} can be built on {event['slab']}"
            self.marks.append(Mark(at_s=at_s, slab=event["slab"], text=text))
        elif kind == "node.joined":
            self.marks.append(Mark(at_s=at_s, slab="", text=f"node{event['node']} has joined again"))
        elif kind == "worker.end" and event["how"] not in (
            "exit code 0",
            "killed by SIGTERM",
            "killed by SIGHUP",
        ):
            self.marks.append(Mark(at_s=at_s, slab="", text=f"{event['worker']} ended: {event['how']}"))
        elif kind == "attempt.resume" and (changed := inputs_said_changed(event)):
            text = f"others than at iteration {event['iteration']}: {', '.join(changed)}"
            self.marks.append(Mark(at_s=at_s, slab="", text=text))
        elif kind == "attempt.end":
            self.exit_code, self.reason = event["exit_code"], event["reason"]

    def attempt(self, number: int, span: AttemptSpan) -> AttemptView:
        """Returns the attempt; anything still open is closed at the last event."""
        held = [replace(lease, end_s=self.last_s) for lease in self.held.values()]
        return AttemptView(
            number=number, span=span, leases=(*self.leases, *held), marks=tuple(self.marks),
            exit_code=self.exit_code, reason=self.reason,
        )  # fmt: skip

    def _node(self, index: int, at_s: float) -> None:
        """Closes the leases of a lost node, which no longer emits events."""
        for slab in [slab for slab in self.held if slab.startswith(f"n{index}s")]:
            self.leases.append(replace(self.held.pop(slab), end_s=at_s))
        self.marks.append(Mark(at_s=at_s, slab="", text=f"node{index} is lost"))

    def _lease(self, kind: str, event: Event, at_s: float) -> None:
        slab = event["slab"]
        if kind == "lease.grant":
            self.held[slab] = LeaseSpan(slab=slab, holder=event["holder"], begin_s=at_s, end_s=at_s)
        elif kind in _GIVEN_UP and slab in self.held:
            self.leases.append(replace(self.held.pop(slab), end_s=at_s))
        if kind == "lease.quarantine":
            self.held[slab] = LeaseSpan(slab=slab, holder="quarantined", begin_s=at_s, end_s=at_s)
        if kind in _BAD:
            self.marks.append(Mark(at_s=at_s, slab=slab, text=f"{slab} {_BAD[kind]}: {event['cause']}"))
