"""What a run's wall time went into, as a function of its attempts and their phases.

Each second from the first attempt's start to the last attempt's end belongs to exactly one category:

- ``start-up``: of the first attempt, until its first sampling begins: processes come up, models load.
- ``lost to restarts``: the same of every later attempt, and all work on iterations that a later
  attempt had to do again because it went on from an older checkpoint.
- ``not running``: between attempts, mostly in Slurm's queue.
- ``sampling``, ``scoring``, ``training``, ``weight transfer``, ``checkpoint``, ``validation``: the
  phases, hand-over of the GPUs included. Where GenRMs score while sampling goes on, that time is
  sampling's.
- ``other``: inside an attempt, in no phase.

Times are wall-clock seconds of the leader's host; they are for people, nothing is decided by them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

START_UP, LOST, NOT_RUNNING, OTHER = "start-up", "lost to restarts", "not running", "other"
ROLLOUT_PHASE = "rollout"
OF_PHASE = {
    "rollout": "sampling", "score": "scoring", "train": "training", "publish": "weight transfer",
    "sync": "weight transfer", "save": "checkpoint", "validate": "validation",
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
    """One attempt. `resumed` is the iteration it went on from, None if it never got so far."""

    begin_s: float
    end_s: float
    resumed: int | None
    phases: tuple[PhaseSpan, ...]


def goodput(attempts: Sequence[AttemptSpan]) -> dict[str, float]:
    """Seconds of each of `CATEGORIES`; they add up to the run's wall time.

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
    """Share of the wall time spent sampling, scoring and training what was kept; 0 for an empty run."""
    total_s = sum(seconds.values())
    return sum(seconds[name] for name in USEFUL) / total_s if total_s > 0 else 0.0


def running_share(seconds: dict[str, float]) -> float:
    """As `goodput_share`, of the time in which attempts ran: what queues cost is not in it."""
    return goodput_share({**seconds, NOT_RUNNING: 0.0})


def gpu_seconds(attempts: Sequence[AttemptSpan], num_gpus: Sequence[int]) -> float:
    """Seconds of attempts times the GPUs that each had, working or not."""
    spans = zip(attempts, num_gpus, strict=True)
    return sum(max(0.0, attempt.end_s - attempt.begin_s) * count for attempt, count in spans)


def _first_sampling(attempt: AttemptSpan) -> float:
    """When sampling first began; an attempt that never sampled was starting all the time."""
    return min((s.begin_s for s in attempt.phases if s.phase == ROLLOUT_PHASE), default=float("inf"))


def _kept_iterations(attempts: Sequence[AttemptSpan]) -> list[float]:
    """For each attempt the last iteration whose work no later attempt did again."""
    kept = [float("inf")] * len(attempts)
    for index in range(len(attempts) - 2, -1, -1):
        resumed = attempts[index + 1].resumed
        kept[index] = min(kept[index + 1], float("inf") if resumed is None else resumed)
    return kept
