"""One attempt as its launcher sees it: starts the steps, passes the request to stop on, and sees the end."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from yatt import clock
from yatt.adapters.files import make_within, read_or_none, unsealed_any
from yatt.adapters.ledger import STOP, attempts, newest_attempt, note, record
from yatt.adapters.patience import patiently
from yatt.adapters.process import log_tail, spawn
from yatt.adapters.slurm import Fields, Slurm, seconds_of
from yatt.config.check import num_trainer_nodes
from yatt.config.schema import RunConfig
from yatt.config.site import WARNING_SLACK_S, SiteConfig
from yatt.core.outcome import BY_HAND, AttemptFacts, Outcome, Verdict, judge
from yatt.core.placement import place
from yatt.errors import EXIT_FINISHED, EXIT_USER_MISTAKE, EXIT_WILL_CONTINUE
from yatt.launch.allocation import Allocation
from yatt.launch.follower import Follower
from yatt.launch.plan import Component
from yatt.launch.steps import BLIND, step_orders
from yatt.obs.events import reason_of_end
from yatt.paths import RunPaths

POLL_S = 0.1
LOOK_S, LOOK_NODES = 0.4, 16
"""Every node's entry is read so often; less often where there are more nodes."""

END_TOGETHER_S = 15.0
"""After the leader's goodbye the others may take so long."""

ORPHANS_S = 1.0
"""After a controller that trains died, the others only burn time."""

UNFIT_S = 10.0
"""Once a node was found unfit the others may take a check and this: what all say is no node's fault."""

NO_GPU = "no GPU answers there, though others have some"

LAST_SRUN_S = 3.0
"""Once every controller has ended; srun does not end while Slurm's controller is away."""

SETTLE_S = 15.0
"""After tasks got SIGTERM and the launcher did not: so long until Slurm must have said why."""

ASK_S = 2.0
"""How long the warned may wait for Slurm to say why, instead of saving."""

SETTLE_LOOK_S = 0.5
MARGIN_S = 2.0
BUDGET_S = 3600.0


@dataclass(slots=True)
class AttemptWatch:
    """One attempt. `signals` are those that the launcher has received since its start."""

    paths: RunPaths
    attempt: int
    config: RunConfig
    site: SiteConfig
    components: tuple[Component, ...]
    allocation: Allocation
    absent: frozenset[int]
    slurm: Slurm
    signals: list[int]
    follower: Follower
    steps: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    records: dict[int, Fields] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    stop: str = ""
    limit_s: float | None = None
    looked_s: float = 0.0

    def run(self) -> Outcome:
        """Start the steps and stay until they have ended; gives what follows."""
        self._start()
        try:
            while any(step.poll() is None for step in self.steps) and not self._is_killed():
                time.sleep(POLL_S)
                self.follower.check()
                if clock.monotonic_s() - self.looked_s < LOOK_S * max(
                    1.0, self.config.launch.nodes / LOOK_NODES
                ):
                    continue
                self.looked_s = clock.monotonic_s()
                with contextlib.suppress(OSError):  # the run folder is looked at again
                    self._look()
                    self._pass_stop_on()
                if self._blind():
                    break
                if self.limit_s is not None and clock.monotonic_s() > self.limit_s:
                    break
            patiently(self._look)
            return patiently(self._outcome)
        finally:
            self._end_steps()

    def _start(self) -> None:
        orders = step_orders(
            self.components, self.site, self.allocation, self.paths, attempt=self.attempt, absent=self.absent
        )
        patiently(lambda: make_within(self.paths.root, self.paths.attempt(self.attempt) / "logs"))
        for order in orders:
            log = self.paths.log(self.attempt, f"srun-{order.component}")
            # An srun that is killed has its tasks killed: none would be left to ask for the next start.
            start = partial(spawn, list(order.argv), env=os.environ, log=log, dies_with_us=False)
            self.steps.append(patiently(start))

    def _look(self) -> None:
        """Read who is there and who has ended."""
        for part in self.components:
            for index in set(part.indexes) - self.absent - self.ended.keys():
                entry = unsealed_any(read_or_none(self.paths.controller_record(self.attempt, index)))
                if entry is not None:
                    self.records[index] = entry
                    if "ended" in entry:
                        self.ended[index] = int(entry["ended"])
        self._limit_the_rest()

    def _limit_the_rest(self) -> None:
        """An end that nobody outlives."""
        trainer_nodes = range(num_trainer_nodes(self.config))
        if self._unfit():
            self._limit(
                0.0 if len(self.records) == self._num_present else self.site.node_check.limit_s + UNFIT_S
            )
        elif self._have_all_ended():
            self._limit(LAST_SRUN_S)
        elif 0 in self.ended and self.ended[0] >= 0:
            self._limit(END_TOGETHER_S)
        elif any(self.ended.get(index, EXIT_FINISHED) != EXIT_FINISHED for index in trainer_nodes):
            self._limit(ORPHANS_S)

    def _unfit(self) -> dict[int, str]:
        """Nodes that say so, and those without a GPU that answers where others have some."""
        found = {index: str(entry["unfit"]) for index, entry in self.records.items() if "unfit" in entry}
        devices = {index: entry["device"] for index, entry in self.records.items() if "device" in entry}
        if "cuda" in devices.values():
            found |= {index: NO_GPU for index, device in devices.items() if device == "cpu"}
        return found

    def _is_everywhere(self, unfit: dict[int, str]) -> bool:
        """Whether all nodes say so; of a single one, whether another said the same in an attempt before."""
        if len(unfit) < self._num_present or self._num_present > 1:
            return 0 < len(unfit) == self._num_present
        mine = self.records[next(iter(unfit))]
        before = (
            unsealed_any(read_or_none(self.paths.controller_record(attempt.number, int(index)))) or {}
            for attempt in attempts(self.paths)
            if attempt.number < self.attempt
            for index in attempt.ended.get("unfit", ())
        )
        return any(
            entry.get("unfit") == mine.get("unfit") and entry.get("slurm_node") != mine.get("slurm_node")
            for entry in before
        )

    def _have_all_ended(self) -> bool:
        return all(set(part.indexes) <= self.ended.keys() | self.absent for part in self.components)

    def _limit(self, seconds: float) -> None:
        limit_s = clock.monotonic_s() + seconds
        self.limit_s = limit_s if self.limit_s is None else min(self.limit_s, limit_s)

    def _pass_stop_on(self) -> None:
        """Passes on Slurm's warning, at any time of this start, or a request from the run folder."""
        request = str(record(self.paths, self.attempt, STOP).get("reason", ""))
        if signal.SIGUSR2 in self.signals and not self.stop and not request:
            job = (self.slurm.show_job(self.allocation.job_id, ASK_S) or [{}])[0]
            request = _why_warned(job, self.site)
            note(self.paths, self.attempt, STOP, {"reason": request})
            self._limit(max(MARGIN_S, _budget_s(job, self.site) - MARGIN_S))
        self.stop = request or self.stop

    def _outcome(self) -> Outcome:
        if blind := self._blind():
            return Outcome(verdict=Verdict.GIVE_UP, reason=blind, exit_code=EXIT_USER_MISTAKE)
        seen = self._seen()
        if not seen.is_killed and not seen.stop and self.ended.get(0) == EXIT_WILL_CONTINUE:
            self._settle()  # the tasks were told to end, we were not: who by?
            seen = self._seen()
        return judge(seen)

    def _settle(self) -> None:
        until_s = clock.monotonic_s() + SETTLE_S
        while clock.monotonic_s() < until_s and not self._is_killed() and not self._is_preempted():
            if newest_attempt(self.paths) > self.attempt:
                return  # by a newer start
            time.sleep(SETTLE_LOOK_S)

    def _seen(self) -> AttemptFacts:
        dead = frozenset(
            index
            for part in self.components
            for index in part.indexes
            if index not in self.ended and self.paths.lost(self.attempt, index).exists()
        )
        roles, unfit = place(self.config), self._unfit()
        gone = dead | self.absent | unfit.keys()
        return AttemptFacts(
            is_killed=self._is_killed(), stop=self.stop, is_preempted=self._is_preempted(), ended=self.ended,
            dead=dead, unfit=unfit, is_unfit_everywhere=self._is_everywhere(unfit),
            trainer_nodes=frozenset(roles.trainer_nodes),
            can_shrink=all(pool - gone for pool in roles.pools.values()),
            cause=reason_of_end(self.paths.events, self.attempt) or self._refusal(),
        )  # fmt: skip

    def _is_killed(self) -> bool:
        return signal.SIGTERM in self.signals

    def _is_preempted(self) -> bool:
        job = (self.slurm.show_job(self.allocation.job_id, ASK_S) or [{}])[0]
        return _is_set(job.get("PreemptTime", ""))

    def _refusal(self) -> str:
        """If no controller came up, what srun said."""
        if self.records:
            return ""
        logs = [self.paths.log(self.attempt, f"srun-{part.name}") for part in self.components]
        return "no controller came up; " + "; ".join(tail for log in logs if (tail := log_tail(log, lines=3)))

    @property
    def _num_present(self) -> int:
        return sum(len(set(part.indexes) - self.absent) for part in self.components)

    def _blind(self) -> str:
        """What a node said that does not see the run folder, and so cannot end in any other way."""
        if len(self.records) == self._num_present:
            return ""
        logs = [self.paths.log(self.attempt, f"srun-{part.name}") for part in self.components]
        lines = [
            line for log in logs for line in (read_or_none(log) or b"").decode(errors="replace").splitlines()
        ]
        return next((line.removeprefix("yatt: ") for line in lines if BLIND in line), "")

    def _end_steps(self) -> None:
        """srun passes SIGUSR1 on, so controllers tidy up; on SIGTERM it has its tasks killed at once."""
        stages = ((signal.SIGUSR1, 6.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 2.0))
        for number, patience_s in stages[-1:] if self._have_all_ended() else stages:
            if self._is_killed():
                return  # Slurm does it
            for step in self.steps:
                if step.poll() is None:
                    step.send_signal(number)
            until_s = clock.monotonic_s() + patience_s
            while clock.monotonic_s() < until_s and any(step.poll() is None for step in self.steps):
                time.sleep(POLL_S)


def _is_set(slurm_time: str) -> bool:
    return slurm_time not in ("", "None", "Unknown", "N/A", "(null)")


def _why_warned(job: Fields, site: SiteConfig) -> str:
    """Slurm's own times tell a warning of its own from a signal that somebody has sent."""
    if not job:
        return "warned by Slurm"
    if _is_set(job.get("PreemptTime", "")):
        return "preempted"
    limit_s, run_s = seconds_of(job.get("TimeLimit", "")), seconds_of(job.get("RunTime", ""))
    early_s = site.signal_lead_s + 2 * WARNING_SLACK_S
    is_near = limit_s is not None and run_s is not None and limit_s - run_s <= early_s
    return "the time limit is near" if is_near else BY_HAND


def _budget_s(job: Fields, site: SiteConfig) -> float:
    """Seconds from Slurm's warning to its kill. Only times of Slurm's own clock are compared."""
    end, preempt = job.get("EndTime", ""), job.get("PreemptTime", "")
    if not _is_set(preempt):
        return float(site.signal_lead_s)
    try:
        return (datetime.fromisoformat(end) - datetime.fromisoformat(preempt)).total_seconds()
    except ValueError:
        return BUDGET_S
