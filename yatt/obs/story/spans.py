"""The attempts of a run as spans of time, from its events and its recorded facts. Pure.

Tolerates what a killed run leaves: phases without an end, ends without a begin, attempts of which no line is
left. Only events of the leader (node 0) make spans, because clocks of nodes differ. Inside an attempt the
leader's monotonic clock is used, so a wall clock that is set meanwhile changes no duration.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from yatt.core.figures.goodput import AttemptSpan, BatchSpan, PhaseSpan
from yatt.errors import EXIT_FINISHED

Event = Mapping[str, Any]


def seconds_at(text: Any) -> float:
    """Returns the seconds since 1970 of an ISO-8601 time; infinity if it is not one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """Recorded facts of an attempt, from its ledger; all of them may be missing.

    Attributes:
        began_s: wall seconds at which its start (the launcher) began; infinite if not recorded.
        started_s, ended_s: wall seconds of the records of its start and end; infinite if not recorded.
        start: identifies the start (launcher) that ran it; empty if not recorded.
        submission: identifies the submission.
        job: its Slurm job; empty without Slurm.
        queued_s: when the job was submitted; infinite if not recorded.
        committed: the newest iteration that is recorded as committed by it.
        is_over: whether its end is recorded.
        exit_code: that of its recorded end.
    """

    began_s: float = math.inf
    started_s: float = math.inf
    ended_s: float = math.inf
    start: str = ""
    submission: str = ""
    job: str = ""
    queued_s: float = math.inf
    committed: int = 0
    is_over: bool = False
    exit_code: int | None = None

    @classmethod
    def of(cls, started: Event, ended: Event, committed: Event) -> "AttemptRecord":
        """Returns the facts in these records of the ledger; empty ones are missing."""
        job, began = str(started.get("job", "")), str(started.get("began", ""))
        saved = [record.get(key) for record, key in ((ended, "committed"), (committed, "iteration"))]
        code = ended.get("exit_code")
        return cls(
            began_s=seconds_at(began), started_s=seconds_at(started.get("wall")),
            ended_s=seconds_at(ended.get("wall")),
            start=f"{job}/{started.get('restarts', '')}/{began}" if began else "",
            submission=str(started.get("submission", "")), job=job,
            queued_s=seconds_at(started.get("submitted")),
            committed=max((count for count in saved if type(count) is int), default=0),
            is_over=bool(ended), exit_code=code if type(code) is int else None,
        )  # fmt: skip


@dataclass(slots=True)
class LeaderClock:
    """Wall seconds of one attempt's events: the leader's by its monotonic clock, since its first event."""

    _offset_s: float | None = None

    def at_s(self, event: Event) -> float:
        """Returns when the event was emitted."""
        at_s, ticks = seconds_at(event["wall"]), int(event.get("t", 0))
        if event.get("node", 0) or not ticks:
            return at_s
        if self._offset_s is None:
            self._offset_s = at_s - ticks / 1e9
        return self._offset_s + ticks / 1e9


@dataclass(slots=True)
class SpanFold:
    """Builds the span of one attempt from its events, in the order in which they were emitted."""

    begin_s: float = math.inf
    last_s: float = 0.0
    resumed: int | None = None
    committed: int = 0
    exit_code: int | None = None
    open_phase: PhaseSpan | None = None
    phases: list[PhaseSpan] = field(default_factory=list)
    open_batch: BatchSpan | None = None
    batches: list[BatchSpan] = field(default_factory=list)
    uploads_s: list[float] = field(default_factory=list)
    _clock: LeaderClock = field(default_factory=LeaderClock)
    _stalls: dict[int, float] = field(default_factory=dict)
    _others_s: list[float] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Adds one event of this attempt."""
        at_s = self._clock.at_s(event)
        if event["kind"] == "ckpt.backpressure":
            self._stall(event)
        if event.get("node", 0):
            self._others_s = [min([at_s, *self._others_s]), max([at_s, *self._others_s])]
        else:
            self.begin_s, self.last_s = min(self.begin_s, at_s), max(self.last_s, at_s)
            self._take(event, event["kind"], at_s)

    def _take(self, event: Event, kind: str, at_s: float) -> None:
        if kind == "phase.begin":
            self._begin(event, at_s)
        elif kind == "phase.part":
            self._part(event, at_s)
        elif kind == "phase.end":
            self._end(event, at_s)
        elif kind in ("batch.begin", "batch.end"):
            self._batch(event, kind, at_s)
        elif kind == "attempt.resume":
            self._resume(event)
        elif kind == "ckpt.commit":
            self.committed = max(self.committed, event["iteration"])
            self.uploads_s.append(_seconds(event))
        elif kind == "attempt.end":
            self._close(at_s)
            self.exit_code = event["exit_code"]

    def span(self) -> AttemptSpan:
        """Returns the attempt; an open phase lasts until the last event, as far as is known."""
        begin_s, last_s = self.begin_s, self.last_s
        if begin_s == math.inf:  # no event of the leader is left
            begin_s, last_s = self._others_s or (0.0, 0.0)
        rest = [replace(self.open_phase, end_s=last_s, is_open=True)] if self.open_phase else []
        last = [replace(self.open_batch, end_s=last_s)] if self.open_batch else []
        return AttemptSpan(
            begin_s=begin_s, end_s=last_s, resumed=self.resumed, phases=(*self.phases, *rest),
            batches=(*self.batches, *last), committed=self.committed, is_over=self.exit_code is not None,
            exit_code=self.exit_code, uploads_s=tuple(self.uploads_s),
        )  # fmt: skip

    def _batch(self, event: Event, kind: str, at_s: float) -> None:
        """Handles a begin or an end. If one of them is lost, the batch is known by the other one."""
        span, self.open_batch = self.open_batch, None
        is_its_end = span is not None and kind == "batch.end" and span.iteration == event["iteration"]
        if span is not None and is_its_end:
            self.batches.append(replace(span, end_s=at_s))
        elif kind == "batch.begin":
            self.open_batch = BatchSpan(
                iteration=event["iteration"], policy_version=event["policy_version"], begin_s=at_s, end_s=at_s
            )

    def _begin(self, event: Event, at_s: float) -> None:
        self._close(at_s)
        parts_s = math.inf if event.get("part") == "prepare" else at_s
        self.open_phase = PhaseSpan(
            phase=event["phase"], iteration=event["iteration"], begin_s=at_s, end_s=at_s, enter_s=parts_s,
            act_s=parts_s,
        )  # fmt: skip

    def _part(self, event: Event, at_s: float) -> None:
        span, part = self.open_phase, event["part"]
        if span is None or _key(event) != (span.phase, span.iteration) or part == "prepare":
            self._begin(event, at_s)  # the begin is lost, or the phase begins again
        if self.open_phase is not None and part != "prepare":
            enter_s = min(self.open_phase.enter_s, at_s)
            act_s = at_s if part == "act" else math.inf
            self.open_phase = replace(self.open_phase, enter_s=enter_s, act_s=act_s)

    def _end(self, event: Event, at_s: float) -> None:
        """Closes the phase. If its begin is lost, it is known from the event's duration."""
        span = self.open_phase
        if span is None or ("phase" in event and event.get("phase") != span.phase):
            seconds = _seconds(event)
            if not seconds or type(event.get("phase")) is not str or type(event.get("iteration")) is not int:
                return
            self._begin(event, max(at_s - seconds, *(each.end_s for each in self.phases[-1:]), self.begin_s))
        self._close(at_s)

    def _resume(self, event: Event) -> None:
        self.resumed = event["iteration"]
        if self.open_phase is not None and event["iteration"]:
            self.open_phase = replace(self.open_phase, restore_s=_seconds(event))

    def _stall(self, event: Event) -> None:
        """Nodes wait at the same time, so the longest wait counts."""
        node = event.get("node", 0)
        self._stalls[node] = self._stalls.get(node, 0.0) + _seconds(event)
        if self.open_phase is not None:
            self.open_phase = replace(self.open_phase, stall_s=max(self._stalls.values()))

    def _close(self, at_s: float) -> None:
        if self.open_phase is not None:
            self.phases.append(replace(self.open_phase, end_s=at_s))
        self.open_phase, self._stalls = None, {}


def attempt_spans(
    folds: Mapping[int, SpanFold], facts: Mapping[int, AttemptRecord]
) -> dict[int, AttemptSpan]:
    """Returns every attempt of which anything is known, by its number, oldest first.

    Args:
        folds: by attempt number, from its events.
        facts: by attempt number, from the ledger.
    """
    found: dict[int, AttemptSpan] = {}
    last, before = None, AttemptRecord()
    for number in sorted({*folds, *facts}):
        known = facts.get(number, AttemptRecord())
        span = _with_facts(folds[number].span() if number in folds else None, known)
        if span is not None:
            found[number] = last = _after(last, span, before, known)
            before = known
    return found


def _with_facts(span: AttemptSpan | None, known: AttemptRecord) -> AttemptSpan | None:
    """Returns the span with the facts of its ledger; None if nothing says when it was."""
    if span is None or not span.end_s:
        if known.started_s == math.inf:
            return None
        span = AttemptSpan(begin_s=known.started_s, end_s=known.started_s, resumed=None, phases=())
    committed = max(span.committed, known.committed)
    code = span.exit_code if span.exit_code is not None else known.exit_code
    if code == EXIT_FINISHED:  # whatever lines are lost
        committed = max([committed, *(each.iteration for each in span.phases)])
    return replace(
        span, begin_s=min(span.begin_s, known.started_s), committed=committed, exit_code=code,
        end_s=max(span.end_s, known.ended_s) if known.ended_s < math.inf else span.end_s,
        is_over=span.is_over or known.is_over,
    )  # fmt: skip


def _after(
    earlier: AttemptSpan | None, span: AttemptSpan, before: AttemptRecord, known: AttemptRecord
) -> AttemptSpan:
    """Returns the span with the time since the attempt before it: in the same start it belongs to the span;
    else it begins with its start, and the job may have waited in the queue."""
    if earlier and known.start and known.start == before.start:
        return replace(span, begin_s=min(span.begin_s, earlier.end_s))
    queued_s = known.queued_s
    if earlier and known.job and known.submission and known.submission == before.submission:
        queued_s = earlier.end_s  # requeued, or a chained job, when the attempt before it had ended
    return replace(span, begin_s=min(span.begin_s, known.began_s), queued_s=queued_s)


def _key(event: Event) -> tuple[str, int]:
    return event["phase"], event["iteration"]


def _seconds(event: Event) -> float:
    seconds = event.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) and 0 < seconds < 1e12 else 0.0
