"""Whether a run is going on somewhere, so that a second start must not begin beside it. Pure.

What is seen from here decides: a launcher on this machine by its process, a job by Slurm, a launcher on
another machine by its leader's heartbeat, which moves while it lives. No wall clocks are compared.
"""

from dataclasses import dataclass
from enum import Enum


class Life(Enum):
    """The newest attempt of a run, seen from one machine."""

    OVER = "over"
    ALIVE = "alive"
    UNSEEN = "unseen"
    """It runs elsewhere or not at all: watch its heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What can be seen without waiting.

    Attributes:
        launcher_is_here: the launcher's identity was noted, and its processes can be seen from this machine.
        launcher_lives: it runs; only if it is here.
        job_lives: Slurm says that the run's newest job runs or waits; None if there is none, or no answer.
        is_of_job: the newest attempt was started by that job.
    """

    is_finished: bool
    is_started: bool
    is_ended: bool
    launcher_is_here: bool
    launcher_lives: bool
    job_lives: bool | None
    is_of_job: bool = False


def life_of(signs: Signs) -> Life:
    """What the signs say.

    A launcher that lives counts also between its attempts, and after the last one until its process ends.
    """
    if signs.job_lives or (signs.launcher_is_here and signs.launcher_lives):
        return Life.ALIVE
    if signs.is_finished or not signs.is_started or signs.is_ended or signs.launcher_is_here:
        return Life.OVER
    if signs.is_of_job and signs.job_lives is False:
        return Life.OVER
    return Life.UNSEEN
