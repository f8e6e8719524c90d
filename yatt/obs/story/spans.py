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

from yatt.adapters.files.lines import Record
from yatt.core.figures.goodput import AttemptSpan, BatchSpan, PhaseSpan
from yatt.errors import EXIT_FINISHED
from yatt.records.events.attempts import (
    AttemptEnded,
    AttemptResumed,
    BatchBegan,
    BatchEnded,
    PhaseBegan,
    PhaseEnded,
    PhasePartBegan,
)
from yatt.records.events.event import Event
from yatt.records.events.log import LoggedEvent
from yatt.records.events.saves import CheckpointCommitted, StoreTooSlow


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
    def of(cls, started: Record, ended: Record, committed: Record) -> "AttemptRecord":
        """Returns the facts in these records of the ledger; empty ones are missing."""
        job, began = str(started.get("job", "")), str(started.get("began", ""))
        saved = [record.get(key) for record, key in ((ended, "committed"), (committed, "iteration"))]
        code = ended.get("exit_code")
        return cls(
            began_s=seconds_at(began),
            started_s=seconds_at(started.get("wall")),
            ended_s=seconds_at(ended.get("wall")),
            start=f"{job}/{started.get('restarts', '')}/{began}" if began else "",
            submission=str(started.get("submission", "")),
            job=job,
            queued_s=seconds_at(started.get("submitted")),
            committed=max((count for count in saved if type(count) is int), default=0),
            is_over=bool(ended),
            exit_code=code if type(code) is int else None,
        )


@dataclass(slots=True)
class LeaderClock:
    """Wall seconds of one attempt's events: the leader's by its monotonic clock, since its first event."""

    _offset_s: float | None = None

    def at_s(self, logged: LoggedEvent) -> float:
        """Returns when the event was emitted."""
        at_s, ticks = seconds_at(logged.wall), logged.ticks_ns
        if logged.node or not ticks:
            return at_s
        if self._offset_s is None:
            self._offset_s = at_s - ticks / 1e9
        return self._offset_s + ticks / 1e9


@dataclass(slots=True)
class _PhaseFold:
    """The phases of one attempt."""

    open: PhaseSpan | None = None
    done: list[PhaseSpan] = field(default_factory=list)
    _stalls: dict[int, float] = field(default_factory=dict)

    def begin(self, event: PhaseBegan | PhasePartBegan | PhaseEnded, at_s: float) -> None:
        """Begins a phase; one that is open ends."""
        self.close(at_s)
        parts_s = math.inf if not isinstance(event, PhaseEnded) and event.part == "prepare" else at_s
        self.open = PhaseSpan(
            phase=event.phase,
            iteration=event.iteration,
            begin_s=at_s,
            end_s=at_s,
            enter_s=parts_s,
            act_s=parts_s,
        )

    def part(self, event: PhasePartBegan, at_s: float) -> None:
        """Handles the next part of a phase."""
        span, part = self.open, event.part
        is_other = span is None or (event.phase, event.iteration) != (span.phase, span.iteration)
        if is_other or part == "prepare":
            self.begin(event, at_s)  # the begin is lost, or the phase begins again
        if self.open is not None and part != "prepare":
            enter_s = min(self.open.enter_s, at_s)
            act_s = at_s if part == "act" else math.inf
            self.open = replace(self.open, enter_s=enter_s, act_s=act_s)

    def end(self, event: PhaseEnded, at_s: float, attempt_s: float) -> None:
        """Closes the phase. If its begin is lost, it is known from the event's duration.

        Args:
            attempt_s: when the attempt began.
        """
        if self.open is None or (event.phase and event.phase != self.open.phase):
            if not event.seconds or not event.phase:
                return
            begin_s = max(at_s - event.seconds, *(each.end_s for each in self.done[-1:]), attempt_s)
            self.begin(event, begin_s)
        self.close(at_s)

    def resume(self, event: AttemptResumed) -> None:
        """Notes that the open phase has restored a checkpoint."""
        if self.open is not None and event.iteration:
            self.open = replace(self.open, restore_s=event.seconds)

    def stall(self, node: int, event: StoreTooSlow) -> None:
        """Nodes wait at the same time, so the longest wait counts."""
        self._stalls[node] = self._stalls.get(node, 0.0) + event.seconds
        if self.open is not None:
            self.open = replace(self.open, stall_s=max(self._stalls.values()))

    def close(self, at_s: float) -> None:
        """Ends the open phase."""
        if self.open is not None:
            self.done.append(replace(self.open, end_s=at_s))
        self.open, self._stalls = None, {}

    def spans(self, last_s: float) -> tuple[PhaseSpan, ...]:
        """Returns all phases; an open one lasts until then, as far as is known."""
        rest = (replace(self.open, end_s=last_s, is_open=True),) if self.open else ()
        return (*self.done, *rest)


@dataclass(slots=True)
class _BatchFold:
    """The batches of one attempt that are sampled beside training."""

    open: BatchSpan | None = None
    done: list[BatchSpan] = field(default_factory=list)

    def take(self, event: BatchBegan | BatchEnded, at_s: float) -> None:
        """Handles a begin or an end. If one of them is lost, the batch is known by the other one."""
        span, self.open = self.open, None
        if isinstance(event, BatchBegan):
            self.open = BatchSpan(
                iteration=event.iteration, policy_version=event.policy_version, begin_s=at_s, end_s=at_s
            )
        elif span is not None and span.iteration == event.iteration:
            self.done.append(replace(span, end_s=at_s))

    def spans(self, last_s: float) -> tuple[BatchSpan, ...]:
        """Returns all batches; an open one lasts until then, as far as is known."""
        return (*self.done, *((replace(self.open, end_s=last_s),) if self.open else ()))


@dataclass(slots=True)
class SpanFold:
    """Builds the span of one attempt from its events, in the order in which they were emitted."""

    begin_s: float = math.inf
    last_s: float = 0.0
    resumed: int | None = None
    committed: int = 0
    exit_code: int | None = None
    uploads_s: list[float] = field(default_factory=list)
    _phases: _PhaseFold = field(default_factory=_PhaseFold)
    _batches: _BatchFold = field(default_factory=_BatchFold)
    _clock: LeaderClock = field(default_factory=LeaderClock)
    _others_s: list[float] = field(default_factory=list)

    def take(self, logged: LoggedEvent) -> None:
        """Adds one event of this attempt."""
        at_s = self._clock.at_s(logged)
        if isinstance(logged.event, StoreTooSlow):
            self._phases.stall(logged.node, logged.event)
        if logged.node:
            self._others_s = [min([at_s, *self._others_s]), max([at_s, *self._others_s])]
        else:
            self.begin_s, self.last_s = min(self.begin_s, at_s), max(self.last_s, at_s)
            self._take(logged.event, at_s)

    def _take(self, event: Event, at_s: float) -> None:
        match event:
            case PhaseBegan():
                self._phases.begin(event, at_s)
            case PhasePartBegan():
                self._phases.part(event, at_s)
            case PhaseEnded():
                self._phases.end(event, at_s, self.begin_s)
            case BatchBegan() | BatchEnded():
                self._batches.take(event, at_s)
            case AttemptResumed():
                self.resumed = event.iteration
                self._phases.resume(event)
            case CheckpointCommitted(iteration=iteration, seconds=seconds):
                self.committed = max(self.committed, iteration)
                self.uploads_s.append(seconds)
            case AttemptEnded():
                self._phases.close(at_s)
                self.exit_code = event.exit_code

    def span(self) -> AttemptSpan:
        """Returns the attempt; what is open lasts until the last event."""
        begin_s, last_s = self.begin_s, self.last_s
        if begin_s == math.inf:  # no event of the leader is left
            begin_s, last_s = self._others_s or (0.0, 0.0)
        return AttemptSpan(
            begin_s=begin_s,
            end_s=last_s,
            resumed=self.resumed,
            phases=self._phases.spans(last_s),
            batches=self._batches.spans(last_s),
            committed=self.committed,
            exit_code=self.exit_code,
            is_over=self.exit_code is not None,
            uploads_s=tuple(self.uploads_s),
        )


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
        span,
        begin_s=min(span.begin_s, known.started_s),
        committed=committed,
        exit_code=code,
        end_s=max(span.end_s, known.ended_s) if known.ended_s < math.inf else span.end_s,
        is_over=span.is_over or known.is_over,
    )


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
