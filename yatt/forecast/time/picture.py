"""One simulated iteration over time: what each slab does, and how many requests run and wait."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from yatt.core.gpus.placement import ROLLOUT, TRAINER
from yatt.forecast.time.comparing import SettingsComparison, SimulatedResult
from yatt.forecast.time.iterations import RecordedBatch, SimulatedIteration
from yatt.forecast.time.sampling import IDLE, SWITCHING

MOST_ROWS = 64
NUM_POINTS = 240
"""Number of moments of a curve."""


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """`state` from `begin_s` to `end_s` of the iteration: a role, idle, or switch."""

    begin_s: float
    end_s: float
    state: str


@dataclass(frozen=True, slots=True)
class RequestCurve:
    """Requests of one role: (second, number that run, number that wait)."""

    role: str
    points: tuple[tuple[float, int, int], ...]


@dataclass(frozen=True, slots=True)
class IterationPicture:
    """One iteration. `rows`: name and spans of a slab, or of the trainer nodes; `num_slabs`: of all slabs."""

    seconds: float
    rows: tuple[tuple[str, tuple[PictureSpan, ...]], ...]
    curves: tuple[RequestCurve, ...]
    num_slabs: int


def picture_of(comparison: SettingsComparison, result: SimulatedResult) -> IterationPicture:
    """Simulates an alternative again and records its last iteration."""
    last = comparison.setup.num_iterations - 1
    iteration = comparison.iterations(result.alternative, traced=last)[last]
    after: tuple[tuple[str, tuple[PictureSpan, ...]], ...] = ()
    if result.alternative.is_shared:
        seconds = iteration.seconds + result.train_s
    else:
        is_ahead = result.alternative.config.rollout.ahead > 0
        begin_s = 0.0 if is_ahead else iteration.seconds
        seconds = max(iteration.seconds, begin_s + result.train_s)
        after = (("trainer nodes", _trainer(begin_s, result.train_s, seconds)),)
    slabs = _slabs(iteration, result, seconds)
    names = sorted(slabs, key=lambda name: int(name[1:]))
    shown = (
        [names[i * len(names) // MOST_ROWS] for i in range(MOST_ROWS)] if len(names) > MOST_ROWS else names
    )
    rows = (*((name, slabs[name]) for name in shown), *after)
    return IterationPicture(seconds, rows, tuple(_curves(iteration, seconds)), len(names))


def _trainer(begin_s: float, train_s: float, end_s: float) -> tuple[PictureSpan, ...]:
    spans = (
        PictureSpan(0.0, begin_s, IDLE),
        PictureSpan(begin_s, begin_s + train_s, TRAINER),
        PictureSpan(begin_s + train_s, end_s, IDLE),
    )
    return tuple(span for span in spans if span.end_s > span.begin_s)


def _slabs(
    iteration: SimulatedIteration, result: SimulatedResult, seconds: float
) -> dict[str, tuple[PictureSpan, ...]]:
    """Returns what each slab does: its roles, the switches after them, and training where it shares."""
    slabs: dict[str, list[PictureSpan]] = {}
    ends = [record.begin_s for record in iteration.records[1:]] + [iteration.seconds]
    switch_s = iteration.switch_s / len(iteration.records)
    for record, end_s in zip(iteration.records, ends, strict=True):
        for slab in record.trace.states:
            spans = slabs.setdefault(slab, [])
            spans += _spans(record, slab, end_s - switch_s)
            spans += [PictureSpan(end_s - switch_s, end_s, SWITCHING)] if switch_s else []
    state = TRAINER if result.alternative.is_shared else IDLE
    rest = PictureSpan(iteration.seconds, seconds, state)
    return {
        name: tuple(span for span in (*spans, rest) if span.end_s > span.begin_s)
        for name, spans in slabs.items()
    }


def _spans(record: RecordedBatch, slab: str, end_s: float) -> Iterator[PictureSpan]:
    changes = record.trace.states[slab]
    ends = [second + record.begin_s for second, _ in changes[1:]] + [end_s]
    for (second, state), until_s in zip(changes, ends, strict=True):
        yield PictureSpan(second + record.begin_s, until_s, _named(record, state))


def _named(record: RecordedBatch, state: str) -> str:
    """Returns a state, with the role of the record: where roles take turns, each is recorded as rollout."""
    return record.role if record.role and state == ROLLOUT else state


def _curves(iteration: SimulatedIteration, seconds: float) -> Iterator[RequestCurve]:
    points: dict[str, list[tuple[float, int, int]]] = {}
    for record in iteration.records:
        for second, role, running, waiting in record.trace.counts:
            points.setdefault(_named(record, role), []).append((second + record.begin_s, running, waiting))
    for role, each in points.items():
        yield RequestCurve(role, (*_thinned(each, seconds), (each[-1][0], 0, 0), (seconds, 0, 0)))


def _thinned(points: Sequence[tuple[float, int, int]], seconds: float) -> tuple[tuple[float, int, int], ...]:
    """Returns the first point, and the last one in each of `NUM_POINTS` equal parts of the time."""
    last = {int(point[0] / seconds * NUM_POINTS): point for point in points}
    return (points[0], *last.values())
