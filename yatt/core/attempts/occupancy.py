"""Decides whether a run is active on any machine, so that a second start must be refused. Pure.

The evidence: a launcher on this machine by its process, a job by Slurm, a launcher on another machine by its
leader's heartbeat. No wall clocks are compared.
"""

from dataclasses import dataclass
from enum import Enum


class Life(Enum):
    """State of a run's newest attempt, seen from one machine."""

    OVER = "over"
    ALIVE = "alive"
    UNSEEN = "unseen"
    """It runs on another machine or not at all: watch its heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Evidence that is available without waiting.

    Attributes:
        launcher_is_here: the launcher's identity was recorded, and its process can be seen from this machine.
        launcher_lives: the launcher runs; only if `launcher_is_here`.
        job_lives: the run's newest job runs or waits; None if there is no job, or no answer from Slurm.
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
    """Returns the state that the evidence shows.

    A running launcher counts as alive also between its attempts, and until its process ends.
    """
    if signs.job_lives or (signs.launcher_is_here and signs.launcher_lives):
        return Life.ALIVE
    if signs.is_finished or not signs.is_started or signs.is_ended or signs.launcher_is_here:
        return Life.OVER
    if signs.is_of_job and signs.job_lives is False:
        return Life.OVER
    return Life.UNSEEN
