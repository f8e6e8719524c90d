"""Attempts in one start of a Slurm job: one srun a component, and the job's next start, asked for once."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from yatt import clock
from yatt.adapters.requeue import Requeue, state_of
from yatt.adapters.slurm import Slurm
from yatt.config.schema import RunConfig
from yatt.core.deadman import Job as Start
from yatt.core.outcome import Outcome, Verdict
from yatt.launch.allocation import Allocation
from yatt.launch.attempts import POLL_S, RETRY_FIRST_S, RETRY_MOST_S
from yatt.launch.backends.images import with_local_image
from yatt.launch.backends.watch import AttemptWatch
from yatt.launch.follower import Follower
from yatt.launch.plan import Component, JobPlan
from yatt.paths import RunPaths

END_OF_START_S = 900.0
TAKEOVER_S = 30.0
ENDING = "Slurm is ending this start"


@dataclass(slots=True)
class SlurmBackend:
    """One start of a job.

    Attributes:
        signals: received since the start of its launcher.
        absent: the run's nodes whose machines were lost in this start.
        has_claim: whether the next start is this process's to ask for.
    """

    config: RunConfig
    paths: RunPaths
    plan: JobPlan
    components: tuple[Component, ...]
    allocation: Allocation
    signals: list[int]
    say: Callable[[str], None]
    slurm: Slurm = field(default_factory=Slurm)
    absent: frozenset[int] = frozenset()
    has_claim: bool = False

    @property
    def submission(self) -> str:
        """As `yatt.launch.attempts.Backend` has it, like all that follow."""
        return self.plan.submission

    def told(self) -> str:
        """After Slurm's warning there is time for another attempt, which saves and hands over."""
        return ENDING if self._is_told_to_end() else ""

    def is_warned(self) -> bool:
        """Slurm's warning ends every wait."""
        return self._is_told_to_end() or signal.SIGUSR2 in self.signals

    def superseded(self, *, has_begun: bool) -> str:
        """A start may claim its first attempt: Slurm has just begun it. It claims a later one only while
        Slurm confirms it, or a stale attempt and a newer one would end each other forever."""
        if not self.slurm.has_scontrol:
            self.say("scontrol is not on the PATH: this start cannot ask Slurm anything, nor requeue itself")
            return ""
        pause_s = RETRY_FIRST_S
        while not self._is_told_to_end():
            state = state_of(self.slurm.show_job(self.allocation.job_id), self.allocation.restarts)
            if state in (Start.OVER, Start.DIED):
                return f"Slurm does not run this start of job {self.allocation.job_id} any more"
            if state is Start.SAME or not has_begun:
                return ""
            self.say("Slurm does not say whether this start still counts; asking again")
            self._pause(pause_s)
            pause_s = min(RETRY_MOST_S, pause_s * 2)
        return ENDING

    def about(self) -> dict[str, Any]:
        """The job and its nodes."""
        hosts = {name: list(nodes) for name, nodes in self.allocation.hosts.items()}
        return {"job": self.allocation.job_id, "restarts": self.allocation.restarts, "hosts": hosts}

    def carry_out(self, attempt: int, follower: Follower) -> Outcome:
        """Start the steps, and stay until they have ended."""
        job, about = self.allocation, self.about()
        self.say(f"attempt {attempt} of job {job.job_id}, restart {job.restarts}, on {about['hosts']}")
        site = with_local_image(
            self.plan.site, self.components, self.allocation, self.absent, self.say, self.is_warned
        )
        watch = AttemptWatch(
            self.paths, attempt, self.config, site, self.components, self.allocation, self.absent,
            self.slurm, self.signals, follower,
        )  # fmt: skip
        outcome = watch.run()
        self.absent |= outcome.gone
        return outcome

    def leave(self, attempt: int, outcome: Outcome) -> None:
        """Ask for the job's next start, or see this one ended."""
        if outcome.verdict is Verdict.KILLED:
            self._wait_for_the_end(ENDING)
        elif outcome.verdict is Verdict.CANCELLED:
            self.slurm.call("scancel", self.allocation.job_id)
            self._wait_for_the_end("cancelled")
        elif outcome.verdict is Verdict.SUCCEED:
            requeue = Requeue(
                paths=self.paths, attempt=attempt, job_id=self.allocation.job_id,
                restarts=self.allocation.restarts, mode=self.plan.site.requeue, slurm=self.slurm,
            )  # fmt: skip
            names = node_names(self.components, self.allocation)
            self._switch_slabs(requeue, outcome.reason, [names[index] for index in sorted(outcome.gone)])

    def _switch_slabs(self, requeue: Requeue, reason: str, gone: list[str]) -> None:
        """Let Slurm start the job anew, once, however long it does not answer; then wait for its kill."""
        pause_s = RETRY_FIRST_S
        while self._has_claim(requeue) and not self._is_told_to_end():
            reply = requeue.succeed(gone, os.environ)
            if reply.code == 0:
                chained = reply.out
                self.say(f"{reason}: {f'job {chained} goes on' if chained else 'requeued'}")
                if not chained:
                    self._pause(END_OF_START_S)
                return
            self.say(f"{reason}, but the next start was not to be had: {reply.says}")
            self._pause(pause_s)
            pause_s = min(RETRY_MOST_S, pause_s * 2)

    def _has_claim(self, requeue: Requeue) -> bool:
        """Make the next start ours to ask for. If another has claimed it, that one is given time."""
        number = 1
        while not self.has_claim and not self._is_told_to_end():
            is_mine = requeue.claim(number)
            self.has_claim = is_mine is True
            if is_mine is False:
                self.say("another has claimed the next start; waiting for it")
                self._pause(TAKEOVER_S)
                number += 1
                if requeue.state() is Start.OVER:
                    self._wait_for_the_end("the next start was asked for")
                    return False
            elif is_mine is None:
                self._pause(RETRY_FIRST_S)
        return self.has_claim

    def _wait_for_the_end(self, why: str) -> None:
        """Slurm ends this start by signals; until then nothing is written and nothing returned."""
        self.say(f"{why}; waiting to be ended")
        self._pause(END_OF_START_S, until_told=False)

    def _pause(self, seconds: float, *, until_told: bool = True) -> None:
        until_s = clock.monotonic_s() + seconds
        while clock.monotonic_s() < until_s and not (until_told and self._is_told_to_end()):
            time.sleep(POLL_S)

    def _is_told_to_end(self) -> bool:
        return signal.SIGTERM in self.signals


def node_names(components: tuple[Component, ...], allocation: Allocation) -> dict[int, str]:
    """Slurm's name of each of the run's nodes."""
    return {
        index: name
        for part in components
        for index, name in zip(part.indexes, allocation.hosts[part.name], strict=False)
    }
