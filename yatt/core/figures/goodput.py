"""The goodput ledger: divides the wall time of a run into categories, from its attempts and their phases.

Each second from the first start to now belongs to exactly one category, so the categories add up to the wall
time. Of an iteration:

- ``rollout``, ``score``, ``train``: the work of these phases. Scores that are computed during the rollout
  count as rollout.
- ``switch``: the two barriers before a phase's work, in which GPUs change their role: sleep, memory check,
  wake.
- ``weight update``: weights are published, and loaded by the engines, also while these wake (phase sync).
- ``saving``: the run waits for a checkpoint: host copy, back-pressure, a commit that is awaited.
- ``validation``, ``export``: these phases.
- ``wasted``: all of this in iterations that are lost, because the attempt ended before they were committed.

Outside of iterations:

- ``start-up``: from the beginning of a start, or the end of the attempt before in the same start, until the
  first rollout, without ``restore``: the time to load a checkpoint.
- ``queue``: between two starts, while a job of the run waited in Slurm's queue, as far as this is known.
- ``not running``: the rest between two starts.
- ``other``: time inside an attempt but outside its phases; it is not accounted for.

Work of an attempt that still runs is not wasted, although a kill could still lose it.

The effective training time ratio is the productive share of the wall time, including queues (Kokolis et al.,
Revisiting Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680); only work that
was preserved is productive (ML productivity goodput, arXiv 2502.06982).

Times are wall-clock seconds; they are only for display.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

ROLLOUT, SCORE, TRAIN, SWITCH = "rollout", "score", "train", "switch"
PUBLICATION, SAVE_STALL, VALIDATION, EXPORT = "weight update", "saving", "validation", "export"
WASTED, START_UP, RESTORE = "wasted", "start-up", "restore"
QUEUE, NOT_RUNNING, OTHER = "queue", "not running", "other"
CATEGORIES = (
    ROLLOUT,
    SCORE,
    TRAIN,
    SWITCH,
    PUBLICATION,
    SAVE_STALL,
    VALIDATION,
    EXPORT,
    WASTED,
    START_UP,
    RESTORE,
    QUEUE,
    NOT_RUNNING,
    OTHER,
)
RUN = "run"
"""An attempt runs now (`Now`)."""

PRODUCTIVE = frozenset({ROLLOUT, SCORE, TRAIN})
_OF_PHASE = {
    "join": START_UP,
    "build": START_UP,
    "rollout": ROLLOUT,
    "score": SCORE,
    "train": TRAIN,
    "publish": PUBLICATION,
    "sync": PUBLICATION,
    "save": SAVE_STALL,
    "commit": SAVE_STALL,
    "export": EXPORT,
    "validate": VALIDATION,
}
_OF_ITERATION = CATEGORIES[: CATEGORIES.index(EXPORT)]
_STARTING = frozenset({"join", "build", "publish", "sync"})
"""Phases before the first rollout, validation or save of an attempt."""

_NEVER_S = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """One phase of one attempt, in wall seconds.

    Attributes:
        enter_s, act_s: when these parts began; at or after the end if they did not. The default is a phase of
            which only the work is known.
        stall_s: seconds of it that the run waited for an upload (back-pressure).
        restore_s: seconds of it that a checkpoint was loaded.
        is_open: whether its end is not recorded: it lasted until the end of the attempt.
    """

    phase: str
    iteration: int
    begin_s: float
    end_s: float
    enter_s: float = 0.0
    act_s: float = 0.0
    stall_s: float = 0.0
    restore_s: float = 0.0
    is_open: bool = False

    @property
    def length_s(self) -> float:
        """Its seconds; 0 if a clock went backwards."""
        return max(0.0, self.end_s - self.begin_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpan:
    """The sampling of one iteration's batch beside training (`rollout.ahead`), in wall seconds.

    Attributes:
        policy_version: that of the engines when it began.
    """

    iteration: int
    policy_version: int
    begin_s: float
    end_s: float

    @property
    def age(self) -> int:
        """Policy versions between its sampling and its training."""
        return self.iteration - 1 - self.policy_version


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """One attempt.

    Attributes:
        batches: what was sampled beside training; phases cover all time, also that of these.
        resumed: the iteration that it resumed from; None if it ended before that.
        committed: the newest iteration that it is known to have committed; 0 if none.
        is_over: whether it has ended, as far as this is recorded.
        exit_code: with which it ended; None if this was not recorded.
        uploads_s: duration of each upload that was committed.
        queued_s: when the job of its start was queued; infinite if this is not known, or if it has no job.
    """

    begin_s: float
    end_s: float
    resumed: int | None
    phases: tuple[PhaseSpan, ...]
    batches: tuple[BatchSpan, ...] = ()
    committed: int = 0
    is_over: bool = False
    exit_code: int | None = None
    uploads_s: tuple[float, ...] = ()
    queued_s: float = _NEVER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The present of a run.

    Attributes:
        at_s: wall seconds.
        doing: what happens now: `RUN` (an attempt runs), or the category of the time after the last attempt.
    """

    at_s: float
    doing: str


def category_of(phase: str, part: str) -> str:
    """Returns the category of a part of a phase: prepare, enter or act."""
    if part == "act" or phase not in _OF_PHASE:
        return _OF_PHASE.get(phase, OTHER)
    return PUBLICATION if (phase, part) == ("sync", "enter") else SWITCH


def goodput_seconds(attempts: Sequence[AttemptSpan], now: Now | None = None) -> dict[str, float]:
    """Returns the seconds per category of `CATEGORIES`; their sum is the wall time.

    An attempt ends where the next one begins: what a stale attempt still does is not the run's work. If
    clocks of hosts differ, no time is negative and none counts twice.

    Args:
        attempts: in the order of their numbers.
        now: None if the run is over: its wall time ends with the last attempt.
    """
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    kept_to = _kept_iterations(attempts, is_running=now is not None and now.doing == RUN)
    at_s = attempts[0].begin_s if attempts else 0.0
    for index, attempt in enumerate(attempts):
        begin_s = max(at_s, attempt.begin_s)
        queued_s = min(begin_s, max(at_s, attempt.queued_s))
        seconds[NOT_RUNNING] += queued_s - at_s
        seconds[QUEUE] += begin_s - queued_s
        at_s = max(begin_s, _end_of(index, attempts, now))
        for category, spent_s in _inside(attempt, begin_s, at_s, kept_to[index]):
            seconds[category] += spent_s
    if now is not None and attempts:
        seconds[now.doing if now.doing in seconds else OTHER] += max(0.0, now.at_s - at_s)
    return seconds


def goodput_share(seconds: dict[str, float]) -> float:
    """Returns the effective training time ratio: the fraction of the wall time in rollout, score and train
    that was preserved; 0 if no time has passed."""
    total_s = sum(seconds.values())
    return sum(seconds[name] for name in PRODUCTIVE) / total_s if total_s > 0 else 0.0


def step_metrics(spent_s: dict[str, float], step_s: float) -> dict[str, float]:
    """Returns the metrics ``goodput/*`` of one iteration: seconds per category, which add up to `step_s`, and
    the productive share. Whether the iteration is preserved is not known yet."""
    seconds = {
        **dict.fromkeys(_OF_ITERATION, 0.0),
        **spent_s,
        OTHER: spent_s.get(OTHER, 0.0) + max(0.0, step_s - sum(spent_s.values())),
    }
    named = {f"goodput/{re.sub('[ -]', '_', name)}_s": count for name, count in seconds.items()}
    return {**named, "goodput/productive": goodput_share(seconds)}


def running_share(seconds: dict[str, float]) -> float:
    """Returns the same as `goodput_share`, as a fraction of the time in which starts ran."""
    return goodput_share({**seconds, NOT_RUNNING: 0.0, QUEUE: 0.0})


def attempt_gpu_seconds(attempts: Sequence[AttemptSpan], num_gpus: Sequence[int]) -> float:
    """Returns the sum of the seconds of each attempt times its GPUs, busy or not."""
    spans = zip(attempts, num_gpus, strict=True)
    return sum(max(0.0, attempt.end_s - attempt.begin_s) * count for attempt, count in spans)


def _end_of(index: int, attempts: Sequence[AttemptSpan], now: Now | None) -> float:
    """Returns the wall second at which an attempt ends for the run."""
    attempt = attempts[index]
    if index + 1 == len(attempts):
        return max(attempt.end_s, now.at_s) if now is not None and now.doing == RUN else attempt.end_s
    next_s = attempts[index + 1].begin_s
    return min(attempt.end_s, next_s) if next_s >= attempt.begin_s else attempt.end_s


def _inside(
    attempt: AttemptSpan, begin_s: float, end_s: float, kept_to: float
) -> Iterator[tuple[str, float]]:
    """Yields categories and their seconds, from `begin_s` to `end_s` without a gap."""
    at_s, is_starting = begin_s, True
    for span in attempt.phases:
        span_begin_s = min(end_s, max(at_s, span.begin_s))
        yield START_UP if is_starting else OTHER, span_begin_s - at_s
        is_starting = is_starting and span.phase in _STARTING
        span_end_s = end_s if span.is_open else min(end_s, max(span_begin_s, span.end_s))
        for category, spent_s in _parts(replace(span, begin_s=span_begin_s, end_s=span_end_s)):
            if is_starting:
                yield RESTORE if category == RESTORE else START_UP, spent_s
            else:
                yield WASTED if span.iteration > kept_to else category, spent_s
        at_s = span_end_s
    yield START_UP if is_starting else OTHER, end_s - at_s


def _parts(span: PhaseSpan) -> Iterator[tuple[str, float]]:
    """Yields categories and their seconds, from the begin to the end of a phase without a gap."""
    act_s = min(span.end_s, max(span.begin_s, span.act_s))
    enter_s = min(act_s, max(span.begin_s, span.enter_s))
    left_s = {RESTORE: span.restore_s, SAVE_STALL: span.stall_s}
    for part, length_s in (
        ("act", span.end_s - act_s),
        ("enter", act_s - enter_s),
        ("prepare", enter_s - span.begin_s),
    ):
        for inner in left_s:
            inner_s = min(length_s, max(0.0, left_s[inner]))
            left_s[inner] -= inner_s
            length_s -= inner_s
            yield inner, inner_s
        yield category_of(span.phase, part), length_s


def _kept_iterations(attempts: Sequence[AttemptSpan], *, is_running: bool) -> list[float]:
    """Returns for each attempt the last iteration of which the work is preserved: the one from which a later
    attempt resumed, or its newest commit if none has resumed yet."""
    kept = [_NEVER_S] * len(attempts)
    resumed = _NEVER_S
    for index in range(len(attempts) - 1, -1, -1):
        attempt = attempts[index]
        is_last = index + 1 == len(attempts)
        if resumed < _NEVER_S:
            kept[index] = resumed
        elif not is_last or attempt.is_over or not is_running:
            kept[index] = max(attempt.committed, attempt.resumed or 0)
        if attempt.resumed is not None:
            resumed = min(resumed, attempt.resumed)
    return kept
