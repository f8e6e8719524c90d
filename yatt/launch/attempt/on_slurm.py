"""Attempts in one start of a Slurm job: one srun per component; requests the job's next start once."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from yatt import clock
from yatt.adapters.processes.process import spawn
from yatt.adapters.slurm.requeue import Requeue, start_state
from yatt.adapters.slurm.slurm import Slurm, submitted_at
from yatt.config.schema import RunConfig
from yatt.core.attempts.deadman import Job as Start
from yatt.core.attempts.outcome import Outcome, Verdict
from yatt.core.gpus.placement import placement_of
from yatt.launch.attempt.attempts import POLL_S, RETRY_FIRST_S, RETRY_MOST_S
from yatt.launch.attempt.follower import Followers
from yatt.launch.attempt.images import with_local_image
from yatt.launch.attempt.warned import is_preempted
from yatt.launch.attempt.watch import AttemptWatch, LostNodes, NodeRecords, StopRequest
from yatt.launch.node.allocation import Allocation
from yatt.launch.node.steps import tidying_steps
from yatt.launch.resolve.plan import Component, JobPlan, components_of
from yatt.paths import RunPaths

END_OF_START_S = 900.0
TAKEOVER_S = 30.0

TIDY_S = 10.0
"""Time limit for removing, at the end of a start, what killed steps left on their nodes."""

ENDING = "Slurm ends this start of the job"


@dataclass(slots=True)
class SlurmBackend:
    """Runs the attempts of one start of a job.

    Attributes:
        signals: signals received since the launcher started.
        absent: nodes of the run that were lost in this start.
        submitted: when the job was queued, as ISO-8601 in UTC; empty if Slurm did not say.
        untidy: nodes whose step was killed, and on which no later step of this start has ended by itself.
    """

    config: RunConfig
    paths: RunPaths
    plan: JobPlan
    allocation: Allocation
    signals: list[int]
    say: Callable[[str], None]
    slurm: Slurm = field(default_factory=Slurm)
    absent: frozenset[int] = frozenset()
    submitted: str = ""
    untidy: frozenset[int] = frozenset()

    @property
    def components(self) -> tuple[Component, ...]:
        """The job's components."""
        return components_of(self.config, self.plan.site, self.plan.layout)

    @property
    def submission(self) -> str:
        """See `yatt.launch.attempt.attempts.Backend`, as for all methods below."""
        return self.plan.submission

    def told(self) -> str:
        """Returns a reason after SIGTERM only: after Slurm's warning, another attempt can still save."""
        return ENDING if self._is_told_to_end() else ""

    def is_warned(self) -> bool:
        """Whether SIGTERM or Slurm's warning (SIGUSR2) came."""
        return self._is_told_to_end() or signal.SIGUSR2 in self.signals

    def superseded(self, *, has_begun: bool) -> str:
        """Allows the first attempt always, because Slurm has just begun this start. A later one needs Slurm's
        confirmation; otherwise a stale and a newer start would end each other forever."""
        if not self.slurm.has_scontrol:
            self.say("scontrol is not on the PATH: this start cannot query Slurm or requeue itself")
            return ""
        pause_s = RETRY_FIRST_S
        while not self._is_told_to_end():
            shown = self.slurm.show_job(self.allocation.job_id)
            self.submitted = submitted_at(shown) or self.submitted
            state = start_state(shown, self.allocation.restarts)
            if state in (Start.OVER, Start.DIED):
                return f"Slurm has ended this start of job {self.allocation.job_id}"
            if state is Start.SAME and not has_begun and is_preempted(shown):
                self.signals.append(signal.SIGUSR2)  # the warning came before this process could receive it
            if state is Start.SAME or not has_begun:
                return ""
            self.say("Slurm does not report whether this start is still current; asking again")
            self._pause(pause_s)
            pause_s = min(RETRY_MOST_S, pause_s * 2)
        return ENDING

    def about(self) -> dict[str, Any]:
        """Returns the job, when it was queued, and its nodes."""
        hosts = {name: list(nodes) for name, nodes in self.allocation.hosts.items()}
        return {
            "job": self.allocation.job_id,
            "restarts": self.allocation.restarts,
            "hosts": hosts,
            "submitted": self.submitted,
        }

    def carry_out(self, attempt: int, followers: Followers) -> Outcome:
        """Starts the steps, and waits until they have ended."""
        job, about = self.allocation, self.about()
        self.say(f"attempt {attempt} of job {job.job_id}, restart {job.restarts}, on {about['hosts']}")
        site = with_local_image(
            self.plan.site, self.components, self.allocation, self.absent, self.say, self.is_warned
        )
        nodes = NodeRecords(self.paths, attempt, self.components, self.absent)
        lost = LostNodes(self.paths, attempt, self.components, job, self.slurm)
        stop = StopRequest(self.paths, attempt, site, job.job_id, self.slurm, self.signals)
        watch = AttemptWatch(self.config, site, job, nodes, lost, stop, followers)
        outcome = watch.run()
        killed, ended = watch.look_for_killed_steps()
        self.untidy = (self.untidy | killed) - ended
        self.absent = placement_of(self.config).with_blocks(self.absent | outcome.gone)
        return outcome

    def leave(self, attempt: int, outcome: Outcome) -> None:
        """Requests the job's next start, or waits for the end of this one. Where none follows, first removes
        what killed steps left on their nodes."""
        if outcome.verdict in (Verdict.FINISHED, Verdict.GIVE_UP, Verdict.CANCELLED):
            self._tidy(attempt)
        if outcome.verdict is Verdict.KILLED:
            self._wait_for_the_end(ENDING)
        elif outcome.verdict is Verdict.CANCELLED:
            self.slurm.call("scancel", self.allocation.job_id)
            self._wait_for_the_end("cancelled")
        elif outcome.verdict is Verdict.SUCCEED:
            requeue = Requeue(
                paths=self.paths,
                attempt=attempt,
                job_id=self.allocation.job_id,
                restarts=self.allocation.restarts,
                mode=self.plan.site.requeue,
                slurm=self.slurm,
            )
            names = self.allocation.names_of(self.components)
            self._ask_for_next_start(
                requeue, outcome.reason, [names[index] for index in sorted(outcome.gone)]
            )

    def _tidy(self, attempt: int) -> None:
        """A node that does not answer is not waited for longer than `TIDY_S`."""
        launch = self.config.launch
        orders = tidying_steps(
            self.components,
            self.plan.site,
            self.allocation,
            self.untidy,
            (launch.scratch_dir, launch.shm_dir),
        )
        steps = []
        with contextlib.suppress(OSError):  # what the run has come to does not change by this
            log = self.paths.log(attempt, "srun-tidy")
            steps = [spawn(list(argv), env=os.environ, log=log) for argv in orders]
        until_s = clock.monotonic_s() + TIDY_S
        while clock.monotonic_s() < until_s and any(step.poll() is None for step in steps):
            time.sleep(POLL_S)
        for step in steps:
            step.kill()
            step.wait()

    def _ask_for_next_start(self, requeue: Requeue, reason: str, gone: list[str]) -> None:
        """Requeues the job once, retrying while Slurm does not answer; then waits to be killed."""
        has_claim, pause_s = self._claimed(requeue), RETRY_FIRST_S
        while has_claim and not self._is_told_to_end():
            reply = requeue.succeed(gone, os.environ)
            if reply.code == 0:
                chained = reply.out
                self.say(f"{reason}: {f'job {chained} continues the run' if chained else 'requeued'}")
                if not chained:
                    self._pause(END_OF_START_S)
                return
            self.say(f"{reason}, but the next start could not be requested: {reply.says}")
            self._pause(pause_s)
            pause_s = min(RETRY_MOST_S, pause_s * 2)

    def _claimed(self, requeue: Requeue) -> bool:
        """Claims the next start; returns whether this process is to request it. If another process has
        claimed it, gives that process time."""
        number = 1
        while not self._is_told_to_end():
            is_mine = requeue.claim(number)
            if is_mine:
                return True
            if is_mine is False:
                self.say("another process has claimed the next start; waiting for it")
                self._pause(TAKEOVER_S)
                number += 1
                if requeue.state() is Start.OVER:
                    self._wait_for_the_end("the next start was requested")
                    return False
            else:
                self._pause(RETRY_FIRST_S)
        return False

    def _wait_for_the_end(self, why: str) -> None:
        """Waits until Slurm ends this start by signals; writes nothing and does not return before."""
        self.say(f"{why}; waiting for Slurm to end this start")
        self._pause(END_OF_START_S, until_told=False)

    def _pause(self, seconds: float, *, until_told: bool = True) -> None:
        until_s = clock.monotonic_s() + seconds
        while clock.monotonic_s() < until_s and not (until_told and self._is_told_to_end()):
            time.sleep(POLL_S)

    def _is_told_to_end(self) -> bool:
        return signal.SIGTERM in self.signals
