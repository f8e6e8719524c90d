"""The interval between saves that loses the least time, from what a run has measured. Pure.

An interval that is too short pays for saves, one that is too long repeats more work after a failure. To first
order the sum is least at sqrt(2 C M), where C is the time that a save costs and M the mean time between
failures (Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; Daly, A
higher order estimate of the optimum checkpoint interval, FGCS 22(3), 2006, which agrees if C is much smaller
than M). Saves are uploaded in the background, so C is only their stall. But one save is in flight at a time,
so an interval cannot be shorter than an upload; nor than an iteration.

Few failures do not give a rate. Below `ENOUGH` the upper limit of the rate at 95 % confidence is assumed, for
failures that come independently (Poisson): with none in the time T it is 3.0 / T (Garwood, Fiducial limits
for the Poisson distribution, Biometrika 28, 1936).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from yatt.core.figures.goodput import RUN, TRAIN, AttemptSpan, Now
from yatt.errors import EXIT_DO_NOT_RESTART, EXIT_FINISHED, EXIT_USER_MISTAKE, EXIT_WILL_CONTINUE

UPPER_LIMIT = (2.996, 4.744, 6.296)
"""Upper limit at 95 % confidence of the mean number of failures, if 0, 1 or 2 were observed."""

ENOUGH = len(UPPER_LIMIT)
"""Number of failures from which their observed rate is used."""

FAR = 2.0
"""Factor by which the present interval may differ from the suggested one."""

_NO_FAILURES = (EXIT_FINISHED, EXIT_WILL_CONTINUE, EXIT_USER_MISTAKE, EXIT_DO_NOT_RESTART)
"""Ends of attempts that lose no work, or that would not be shorter with more saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """Measurements of a run.

    Attributes:
        num_saves: host copies taken.
        stall_s: mean time that the run waited for a save.
        upload_s: mean time of an upload; 0 if none was committed yet.
        step_s: mean time of an iteration.
        failures: attempts that had restored their state and ended by a failure or a kill.
        running_s: time in which attempts ran.
    """

    num_saves: int
    stall_s: float
    upload_s: float
    step_s: float
    failures: int
    running_s: float


LEAST_S = 3600.0
"""Time without a failure after which its lack says something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """The suggested interval.

    Attributes:
        interval_s, iterations: the interval, in time and in whole iterations.
        present_s: the interval that the config gives, as far as uploads allow it; infinite if only the end of
            the run is saved.
        mtbf_s: mean time between failures that was used.
        is_assumed: whether this is a limit, because few failures were observed.
        measured: the measurements.
    """

    interval_s: float
    iterations: int
    present_s: float
    mtbf_s: float
    is_assumed: bool
    measured: SaveCosts

    @property
    def is_founded(self) -> bool:
        """Whether there is anything to conclude from: a failure, or `LEAST_S` without one."""
        return self.measured.failures > 0 or self.measured.running_s >= LEAST_S

    @property
    def is_far(self) -> bool:
        """Whether the present interval is certainly off by more than the factor `FAR`. An assumed rate of
        failures is an upper limit: with it, only a present interval that is too short is certain."""
        if self.present_s * FAR < self.interval_s:
            return True
        return not self.is_assumed and self.present_s > FAR * self.interval_s


def measured_saves(attempts: Sequence[AttemptSpan], now: Now | None) -> SaveCosts:
    """Returns the measurements in the attempts of a run, oldest first."""
    is_running = now is not None and now.doing == RUN
    over = attempts[:-1] if is_running and attempts and not attempts[-1].is_over else attempts
    phases = [span for attempt in attempts for span in attempt.phases]
    taken = [span.length_s for span in phases if span.phase == "save" and not span.is_open]
    uploads_s = [seconds for attempt in attempts for seconds in attempt.uploads_s if seconds > 0]
    stalls_s = sum(taken) + sum(span.stall_s for span in phases if span.phase != "save")
    worked = [_iterations_of(attempt) for attempt in attempts]
    num_trained = sum(count for count, _ in worked)
    return SaveCosts(
        num_saves=len(taken),
        stall_s=stalls_s / len(taken) if taken else 0.0,
        upload_s=sum(uploads_s) / len(uploads_s) if uploads_s else 0.0,
        step_s=sum(seconds for _, seconds in worked) / num_trained if num_trained else 0.0,
        failures=sum(each.resumed is not None and each.exit_code not in _NO_FAILURES for each in over),
        running_s=sum(max(0.0, attempt.end_s - attempt.begin_s) for attempt in attempts),
    )


def suggested_interval(seen: SaveCosts, *, every: int, every_s: float) -> Suggestion | None:
    """Returns the suggested interval; None as long as no save and no iteration has been measured.

    Args:
        every, every_s: the configured interval, in iterations and seconds; 0: none.
    """
    if not seen.num_saves or seen.step_s <= 0 or seen.running_s <= 0:
        return None
    is_assumed = seen.failures < ENOUGH
    mtbf_s = seen.running_s / (UPPER_LIMIT[seen.failures] if is_assumed else seen.failures)
    shortest_s = max(seen.upload_s, seen.step_s)
    interval_s = max(shortest_s, young_s(seen.stall_s, mtbf_s))
    configured = [length for length in (every * seen.step_s, every_s) if length > 0]
    return Suggestion(
        interval_s=interval_s,
        iterations=max(1, round(interval_s / seen.step_s)),
        present_s=max(shortest_s, min(configured)) if configured else math.inf,
        mtbf_s=mtbf_s,
        is_assumed=is_assumed,
        measured=seen,
    )


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Returns the interval at which the time of saves and of repeated work is least, in seconds.

    Source: Young 1974, equation 3.
    """
    return math.sqrt(2.0 * cost_s * mtbf_s)


def _iterations_of(attempt: AttemptSpan) -> tuple[int, float]:
    """Returns the number of complete iterations of an attempt, and their seconds together."""
    begun = [span.begin_s for span in attempt.phases if span.phase == "rollout"]
    trained = [span.end_s for span in attempt.phases if span.phase == TRAIN and not span.is_open]
    if not begun or not trained:
        return 0, 0.0
    return len(trained), max(0.0, max(trained) - min(begun))
