"""One start of a Slurm job: runs in the batch script, starts a controller on every node, decides what next.

    python -m yatt.launch.job RUN        in an sbatch script; `yatt submit` makes submitit call the same

The launcher does no work of the run. Each attempt claims an epoch and gets one srun a component. What ends it
decides the rest: finished; stopped by Slurm's signal, then succeeded by the next start of the job, exactly
once; crashed, then begun again on the nodes that are left, or elsewhere if they are too few.
"""

import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from yatt import clock
from yatt.adapters.files import share_with
from yatt.adapters.ledger import ENDED, attempts, look_whether_finished, newest_epoch, note
from yatt.adapters.patience import ended_by
from yatt.adapters.slurm import Slurm
from yatt.adapters.succession import Succession, state_of
from yatt.config.load import load_resolved
from yatt.config.schema import RunConfig
from yatt.control.epochs import claim_epoch, mark_finished
from yatt.core.deadman import Job as Start
from yatt.core.outcome import Outcome, Verdict
from yatt.core.restart import AttemptEnd, may_begin
from yatt.errors import (
    EXIT_FINISHED,
    EXIT_USER_MISTAKE,
    EXIT_WILL_CONTINUE,
    StoreUnreachable,
    YattError,
)
from yatt.launch.allocation import Allocation, allocation_of
from yatt.launch.committed import await_committed, committed_if_known
from yatt.launch.folder import open_attempt
from yatt.launch.folder_wait import FolderWait
from yatt.launch.follower import Follower
from yatt.launch.plan import Component, JobPlan, components_of, effective, read_plan
from yatt.launch.watch import AttemptWatch
from yatt.paths import RunPaths

END_OF_START_S = 900.0
TAKEOVER_S = 30.0
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0
POLL_S = 0.2
PLAN_S = 600.0
"""How long the run folder is waited for before the config is read."""


@dataclass(slots=True)
class Job:
    """One start of the job.

    Attributes:
        gone: the run's nodes whose machines were lost in this start.
        epoch: of this start's newest attempt.
        has_claim: whether the next start is this process's to ask for.
        limit_s: how long a step in the run folder may wait; `launch.phase_timeout_s` once that is read.
    """

    paths: RunPaths
    slurm: Slurm = field(default_factory=Slurm)
    signals: list[int] = field(default_factory=list)
    gone: frozenset[int] = frozenset()
    epoch: int = 0
    has_claim: bool = False
    limit_s: float = PLAN_S

    def run(self) -> int:
        """Until this start is over; gives the exit code."""
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, lambda received, _frame: self.signals.append(received))
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        if self._folder(partial(look_whether_finished, self.paths)):
            say(f"{self.paths.root} is finished: nothing to do")
            return EXIT_FINISHED
        plan = self._folder(partial(read_plan, self.paths))
        config = effective(self._folder(partial(load_resolved, self.paths.config)), plan.site, plan.resized)
        self.limit_s = config.launch.phase_timeout_s
        share_with(config.run.share)
        components = components_of(config, plan.site, plan.layout)
        allocation = allocation_of(os.environ, components)
        follower = Follower(self.paths, say)
        follower.start(config, os.environ)
        try:
            for count in itertools.count():
                code = self._attempt(config, plan, components, allocation)
                if code is not None:
                    return code
                self._pause(min(RETRY_MOST_S, RETRY_FIRST_S * count))
            raise AssertionError("the loop returns")
        finally:
            follower.end()

    def _attempt(
        self, config: RunConfig, plan: JobPlan, components: tuple[Component, ...], allocation: Allocation
    ) -> int | None:
        """One attempt; None if another is to follow in this start."""
        if superseded := self._folder(partial(self._superseded, allocation)):
            say(superseded)
            return EXIT_WILL_CONTINUE
        try:
            begins = not self._folder(partial(attempts, self.paths))
            committed = await_committed(
                config, self.paths.root, is_told=self._is_told_anything, say=say, begins=begins
            )
        except StoreUnreachable as error:
            say(str(error))
            return EXIT_WILL_CONTINUE
        if self._is_told_to_end():
            say("Slurm is ending this start")
            return EXIT_WILL_CONTINUE
        if committed is None:  # warned by Slurm meanwhile: the attempt hands over as soon as it has begun
            committed = self._folder(self._last_known)
        elif (code := self._folder(partial(self._refused, plan, committed, config))) is not None:
            return code
        self.epoch = epoch = self._folder(partial(claim_epoch, self.paths))
        self._open(epoch, config, plan, allocation, committed)
        succession = Succession(
            paths=self.paths, epoch=epoch, job_id=allocation.job_id, restarts=allocation.restarts,
            mode=plan.site.requeue, slurm=self.slurm,
        )  # fmt: skip
        watch = AttemptWatch(
            self.paths, epoch, config, plan.site, components, allocation, self.gone, self.slurm, self.signals
        )
        outcome = watch.run()
        names = node_names(components, allocation)
        keep_off = [names[index] for index in sorted(outcome.gone)]
        return self._after(outcome, config, succession, keep_off)

    def _refused(self, plan: JobPlan, committed: int, config: RunConfig) -> int | None:
        """The exit code of a run that gets no further; None if another attempt may begin."""
        limit = config.run.max_attempts_without_progress
        decision = may_begin(self._ends(plan, committed), committed=committed, max_without_progress=limit)
        if decision.again:
            return None
        say(f"{decision.reason}; the last: {attempts(self.paths)[-1].ended.get('reason', 'cut off')}")
        return decision.exit_code

    def _superseded(self, allocation: Allocation) -> str:
        """Why this start may not begin another attempt, empty if it may.

        A start claims its first epoch by right: Slurm has just begun it. A later one it claims only while it
        is still the run's newest start, or two of them would end each other for ever.
        """
        if self.epoch and newest_epoch(self.paths) > self.epoch:
            return "another start of this run is newer: this one is over"
        if not self.slurm.has_scontrol:
            say("scontrol is not on the PATH: this start cannot ask Slurm anything, nor requeue itself")
            return ""
        pause_s = RETRY_FIRST_S
        while not self._is_told_to_end():
            state = state_of(self.slurm.show_job(allocation.job_id), allocation.restarts)
            if state is Start.OVER:
                return f"Slurm does not run this start of job {allocation.job_id} any more"
            if state is Start.SAME or not self.epoch:
                return ""
            say("Slurm does not say whether this start still counts; asking again")
            self._pause(pause_s)
            pause_s = min(RETRY_MOST_S, pause_s * 2)
        return "Slurm is ending this start"

    def _after(
        self, outcome: Outcome, config: RunConfig, succession: Succession, keep_off: list[str]
    ) -> int | None:
        epoch = succession.epoch
        known = self._folder(self._last_known)
        committed = committed_if_known(config, self.paths.root, otherwise=known)
        say(f"attempt {epoch} ended at iteration {committed}: {outcome.reason}")
        if outcome.verdict is not Verdict.KILLED:
            ended = {"exit_code": outcome.exit_code, "reason": outcome.reason, "committed": committed}
            self._folder(partial(note, self.paths, epoch, ENDED, ended))
        match outcome.verdict:
            case Verdict.FINISHED:
                self._folder(partial(mark_finished, self.paths, epoch))
                return EXIT_FINISHED
            case Verdict.KILLED:
                self._wait_for_the_end("Slurm is ending this start")
                return EXIT_WILL_CONTINUE
            case Verdict.CANCELLED:
                self.slurm.call("scancel", succession.job_id)
                self._wait_for_the_end("cancelled")
                return EXIT_WILL_CONTINUE
            case Verdict.SUCCEED:
                self._hand_over(succession, outcome.reason, keep_off)
                return EXIT_WILL_CONTINUE
            case Verdict.GIVE_UP:
                return outcome.exit_code
        self.gone |= outcome.gone
        return None

    def _hand_over(self, succession: Succession, reason: str, keep_off: list[str]) -> None:
        """Let Slurm start the job anew, once, however long it does not answer; then wait for its kill."""
        pause_s = RETRY_FIRST_S
        while self._has_claim(succession) and not self._is_told_to_end():
            reply = succession.succeed(keep_off, os.environ)
            if reply.code == 0:
                chained = reply.out
                say(f"{reason}: {f'job {chained} goes on' if chained else 'requeued'}")
                if not chained:
                    self._pause(END_OF_START_S)
                return
            say(f"{reason}, but the next start was not to be had: {reply.says}")
            self._pause(pause_s)
            pause_s = min(RETRY_MOST_S, pause_s * 2)

    def _has_claim(self, succession: Succession) -> bool:
        """Make the next start ours to ask for. If another has claimed it, that one is given time."""
        number = 1
        while not self.has_claim and not self._is_told_to_end():
            is_mine = succession.claim(number)
            self.has_claim = is_mine is True
            if is_mine is False:
                say("another has claimed the next start; waiting for it")
                self._pause(TAKEOVER_S)
                number += 1
                if succession.state() is Start.OVER:
                    self._wait_for_the_end("the next start was asked for")
                    return False
            elif is_mine is None:
                self._pause(RETRY_FIRST_S)
        return self.has_claim

    def _wait_for_the_end(self, why: str) -> None:
        """Slurm ends this start by signals; until then nothing is written and nothing returned."""
        say(f"{why}; waiting to be ended")
        self._pause(END_OF_START_S, until_told=False)

    def _pause(self, seconds: float, *, until_told: bool = True) -> None:
        until_s = clock.monotonic_s() + seconds
        while clock.monotonic_s() < until_s and not (until_told and self._is_told_to_end()):
            time.sleep(POLL_S)

    def _is_told_to_end(self) -> bool:
        return signal.SIGTERM in self.signals

    def _is_told_anything(self) -> bool:
        return self._is_told_to_end() or signal.SIGUSR2 in self.signals

    def _open(
        self, epoch: int, config: RunConfig, plan: JobPlan, allocation: Allocation, committed: int
    ) -> None:
        hosts = {name: list(nodes) for name, nodes in allocation.hosts.items()}
        content = {
            "pid": os.getpid(), "host": os.uname().nodename, "wall": clock.wall_iso(),
            "job": allocation.job_id, "restarts": allocation.restarts, "hosts": hosts,
            "submission": plan.submission, "committed": committed, "absent": sorted(self.gone),
        }  # fmt: skip
        open_attempt(self._folder, self.paths, epoch, config, content)
        say(f"attempt {epoch} of job {allocation.job_id}, restart {allocation.restarts}, on {hosts}")

    @property
    def _folder(self) -> FolderWait:
        """Steps in the run folder, which may fail for a while."""
        return FolderWait(
            root=self.paths.root, limit_s=self.limit_s, signals=self.signals,
            ending=frozenset({signal.SIGTERM}), say=say,
        )  # fmt: skip

    def _ends(self, plan: JobPlan, committed: int) -> list[AttemptEnd]:
        """How this submission's attempts ended; what an attempt had committed, its successor found."""
        mine = [a for a in attempts(self.paths) if a.started.get("submission") == plan.submission]
        found = [*(int(a.started["committed"]) for a in mine[1:]), committed][: len(mine)]
        return [
            AttemptEnd(attempt.ended.get("exit_code"), after)
            for attempt, after in zip(mine, found, strict=True)
        ]

    def _last_known(self) -> int:
        """The newest committed iteration when the newest attempt began, 0 before the first."""
        return max((int(attempt.started.get("committed", 0)) for attempt in attempts(self.paths)), default=0)


def node_names(components: tuple[Component, ...], allocation: Allocation) -> dict[int, str]:
    """Slurm's name of each of the run's nodes."""
    return {
        index: name
        for part in components
        for index, name in zip(part.indexes, allocation.hosts[part.name], strict=False)
    }


def say(text: str) -> None:
    """One line for people, in the job's log."""
    sys.stdout.write(f"{clock.wall_iso()} yatt: {text}\n")
    sys.stdout.flush()


def main() -> int:
    """The command line of sbatch scripts."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m yatt.launch.job RUN\n")
        return EXIT_USER_MISTAKE
    try:
        return Job(RunPaths(Path(sys.argv[1]).absolute())).run()
    except (YattError, OSError) as error:
        return ended_by(error, "yatt")


if __name__ == "__main__":
    sys.exit(main())
