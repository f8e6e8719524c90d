"""Divides a run's wall time into categories, from its attempts and their phases.

Each second from the first attempt's start to the last attempt's end belongs to exactly one category:

- ``start-up``: the first attempt until its first sampling: processes start, models load.
- ``lost to restarts``: the same for every later attempt, and iterations that a later attempt
  repeated because it resumed from an older checkpoint.
- ``not running``: between attempts, mostly in Slurm's queue.
- ``sampling``, ``scoring``, ``training``, ``weight transfer``, ``checkpoint``, ``validation``: the
  phases, including the transfer of the GPUs between roles. Time in which GenRMs score during
  sampling counts as sampling.
- ``other``: time inside an attempt but outside its phases.

Times are wall-clock seconds of the leader's host; they are only for display.
"""

from collections.abc import Sequence
from dataclasses import dataclass

START_UP, LOST, NOT_RUNNING, OTHER = "start-up", "lost to restarts", "not running", "other"
ROLLOUT_PHASE = "rollout"
OF_PHASE = {
    "rollout": "sampling", "score": "scoring", "train": "training", "publish": "weight transfer",
    "sync": "weight transfer", "save": "checkpoint", "commit": "checkpoint", "export": "checkpoint",
    "validate": "validation",
}  # fmt: skip
CATEGORIES = (
    *dict.fromkeys(OF_PHASE.values()), START_UP, LOST, NOT_RUNNING, OTHER
)  # fmt: skip
USEFUL = frozenset({"sampling", "scoring", "training"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """One phase of one attempt, in wall seconds."""

    phase: str
    iteration: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """One attempt. `resumed`: the iteration that it resumed from; None if it ended before that."""

    begin_s: float
    end_s: float
    resumed: int | None
    phases: tuple[PhaseSpan, ...]


def goodput(attempts: Sequence[AttemptSpan]) -> dict[str, float]:
    """Returns the seconds per category of `CATEGORIES`; their sum is the run's wall time.

    Args:
        attempts: in the order in which they ran.
    """
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    kept_to = _kept_iterations(attempts)
    for number, attempt in enumerate(attempts):
        if number:
            seconds[NOT_RUNNING] += max(0.0, attempt.begin_s - attempts[number - 1].end_s)
        sampling_s = _first_sampling(attempt)
        inside_s = 0.0
        for span in attempt.phases:
            spent_s = max(0.0, span.end_s - span.begin_s)
            inside_s += spent_s
            starting = span.begin_s < sampling_s and span.phase != "validate"
            if span.iteration > kept_to[number] or (starting and number):
                category = LOST
            else:
                category = START_UP if starting else OF_PHASE.get(span.phase, OTHER)
            seconds[category] += spent_s
        seconds[OTHER] += max(0.0, attempt.end_s - attempt.begin_s - inside_s)
    return seconds


def goodput_share(seconds: dict[str, float]) -> float:
    """Returns the fraction of wall time spent on sampling, scoring and training that was kept; 0 if none."""
    total_s = sum(seconds.values())
    return sum(seconds[name] for name in USEFUL) / total_s if total_s > 0 else 0.0


def running_share(seconds: dict[str, float]) -> float:
    """Returns the same as `goodput_share`, as a fraction of the time in which attempts ran."""
    return goodput_share({**seconds, NOT_RUNNING: 0.0})


def gpu_seconds(attempts: Sequence[AttemptSpan], num_gpus: Sequence[int]) -> float:
    """Returns the sum of the seconds of each attempt times its GPUs, busy or not."""
    spans = zip(attempts, num_gpus, strict=True)
    return sum(max(0.0, attempt.end_s - attempt.begin_s) * count for attempt, count in spans)


def _first_sampling(attempt: AttemptSpan) -> float:
    """Returns the time of the first sampling; infinity if there was none."""
    return min((s.begin_s for s in attempt.phases if s.phase == ROLLOUT_PHASE), default=float("inf"))


def _kept_iterations(attempts: Sequence[AttemptSpan]) -> list[float]:
    """Returns for each attempt the last iteration that no later attempt repeated."""
    kept = [float("inf")] * len(attempts)
    for index in range(len(attempts) - 2, -1, -1):
        resumed = attempts[index + 1].resumed
        kept[index] = min(kept[index + 1], float("inf") if resumed is None else resumed)
    return kept
