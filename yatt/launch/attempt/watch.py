"""One attempt in a Slurm job: starts the steps, forwards a stop request, and determines how it ended.

`LostNodes` finds nodes that the job has lost before the controllers met. Later the leader notices a silent
node. Before, only Slurm knows: with ``--no-kill`` it removes a dead node from the job's node list and leaves
the others alone. Every attempt that includes the dead node would wait for it until `launch.start_timeout_s`.
"""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from functools import partial

from yatt import clock
from yatt.adapters.files.files import make_within, read_or_none, unsealed_any
from yatt.adapters.files.patience import with_retries
from yatt.adapters.processes.process import log_tail, spawn
from yatt.adapters.run_folder.ledger import (
    STOP,
    newest_attempt,
    record_of_attempt,
    started_attempts,
    write_record,
)
from yatt.adapters.slurm.requeue import start_state
from yatt.adapters.slurm.slurm import Fields, Slurm, expand_node_list
from yatt.config.check import num_trainer_nodes
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig
from yatt.core.attempts.deadman import Job as Start
from yatt.core.attempts.outcome import AttemptFacts, Outcome, Verdict, outcome_of
from yatt.core.gpus.placement import placement_of
from yatt.errors import EXIT_FINISHED, EXIT_USER_MISTAKE, EXIT_WILL_CONTINUE
from yatt.launch.attempt.follower import Followers
from yatt.launch.attempt.warned import budget_s, is_preempted, why_warned
from yatt.launch.node.allocation import Allocation
from yatt.launch.node.steps import BLIND, step_orders
from yatt.launch.resolve.plan import Component
from yatt.obs.story.events import reason_of_end
from yatt.paths import RunPaths

POLL_S = 0.1
"""Interval for looking at signals, whatever the number of nodes: after a warning seconds count."""

LOOK_S, LOOK_NODES = 0.4, 16
"""Interval for reading a stop request of others, and every node's record up to this many nodes; records of
more nodes are read less often."""

END_TOGETHER_S = 15.0
"""Time limit for the other controllers after the leader has ended."""

ORPHANS_S = 1.0
"""Time limit for the other controllers after one of a trainer node died: they cannot make progress."""

UNFIT_S = 10.0
"""Extra time for the other nodes' checks once one node is unfit: if all fail, no single node is at fault."""

NO_GPU = "no GPU answers on this node, but other nodes have GPUs"

LAST_SRUN_S = 3.0
"""Time limit for srun once every controller has ended; srun does not end while slurmctld is down."""

SETTLE_S = 15.0
"""Longest wait for Slurm's reason if the tasks got SIGTERM and the launcher did not."""

ASK_S = 2.0
"""Longest wait for Slurm's reason after a warning; it shortens the time left for saving."""

SETTLE_LOOK_S = 0.5
MARGIN_S = 2.0

LOST_LOOK_S = 10.0
LOST_ASK_S = 5.0


@dataclass(slots=True)
class LostNodes:
    """Finds nodes of the run that the job has lost; queries Slurm only until the controllers have met."""

    paths: RunPaths
    attempt: int
    components: tuple[Component, ...]
    allocation: Allocation
    slurm: Slurm
    lost: frozenset[int] = frozenset()
    looked_s: float = 0.0

    def look(self) -> frozenset[int]:
        """Returns the run's nodes that are no longer nodes of the job; keeps what is known without an answer.

        Raises:
            OSError: the run folder fails.
        """
        now_s = clock.monotonic_s()
        self.looked_s = self.looked_s or now_s
        if now_s - self.looked_s < LOST_LOOK_S or self.paths.all_endpoints(self.attempt).exists():
            return self.lost
        self.looked_s = now_s
        shown = self.slurm.show_job(self.allocation.job_id, LOST_ASK_S) or []
        if start_state(shown, self.allocation.restarts) is not Start.SAME:
            return self.lost  # no answer, or about another start, which has other nodes
        with contextlib.suppress(ValueError):  # not a list of nodes
            names = {name for fields in shown for name in expand_node_list(fields.get("NodeList", ""))}
            hosts = self.allocation.names_of(self.components)
            self.lost = frozenset(index for index, name in hosts.items() if name not in names)
        return self.lost


@dataclass(slots=True)
class NodeRecords:
    """What the nodes' steps have recorded of an attempt, by the run's nodes.

    Attributes:
        records: of steps that have begun.
        ended: exit codes of controllers of steps that have ended.
    """

    paths: RunPaths
    attempt: int
    components: tuple[Component, ...]
    absent: frozenset[int]
    records: dict[int, Fields] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)

    def look(self) -> None:
        """Reads which nodes have started and which have ended."""
        for part in self.components:
            for index in set(part.indexes) - self.absent - self.ended.keys():
                entry = unsealed_any(read_or_none(self.paths.controller_record(self.attempt, index)))
                if entry is not None:
                    self.records[index] = entry
                    if "ended" in entry:
                        self.ended[index] = int(entry["ended"])

    @property
    def num_present(self) -> int:
        """Number of nodes that take part."""
        return sum(len(set(part.indexes) - self.absent) for part in self.components)

    def unfit(self) -> dict[int, str]:
        """Returns nodes that failed their check, and nodes without a GPU if other nodes have some."""
        found = {index: str(entry["unfit"]) for index, entry in self.records.items() if "unfit" in entry}
        devices = {index: entry["device"] for index, entry in self.records.items() if "device" in entry}
        if "cuda" in devices.values():
            found |= {index: NO_GPU for index, device in devices.items() if device == "cpu"}
        return found

    def is_everywhere(self, unfit: dict[int, str]) -> bool:
        """Whether all nodes are unfit; for a single node, whether another one failed the same way before."""
        if len(unfit) < self.num_present or self.num_present > 1:
            return 0 < len(unfit) == self.num_present
        mine = self.records[next(iter(unfit))]
        before = (
            unsealed_any(read_or_none(self.paths.controller_record(attempt.number, int(index)))) or {}
            for attempt in started_attempts(self.paths)
            if attempt.number < self.attempt
            for index in attempt.ended.get("unfit", ())
        )
        return any(
            entry.get("unfit") == mine.get("unfit") and entry.get("slurm_node") != mine.get("slurm_node")
            for entry in before
        )

    def have_all_ended(self) -> bool:
        """Whether the controller of every node has ended."""
        return all(set(part.indexes) <= self.ended.keys() | self.absent for part in self.components)

    def is_lost(self, index: int) -> bool:
        """Whether the leader lost the last life of a node's controller that its step has begun or will begin.
        A joining job's node in its place does not count."""
        found = unsealed_any(read_or_none(self.paths.lost(self.attempt, index)))
        return found is not None and int(found["life"]) >= int(self.records.get(index, {}).get("life", 1))

    def refusal(self) -> str:
        """Returns srun's output if no controller started."""
        if self.records:
            return ""
        logs = [self.paths.log(self.attempt, f"srun-{part.name}") for part in self.components]
        return "no controller started; " + "; ".join(tail for log in logs if (tail := log_tail(log, lines=3)))

    def blind(self) -> str:
        """Returns the message of a node that cannot see the run folder, and so leaves no record there."""
        if len(self.records) == self.num_present:
            return ""
        logs = [self.paths.log(self.attempt, f"srun-{part.name}") for part in self.components]
        lines = [
            line for log in logs for line in (read_or_none(log) or b"").decode(errors="replace").splitlines()
        ]
        return next((line.removeprefix("yatt: ") for line in lines if BLIND in line), "")


@dataclass(slots=True)
class StopRequest:
    """What Slurm, or anybody, wants of this attempt before its end.

    Attributes:
        signals: received by the launcher since its start.
        reason: why the attempt is to stop; empty if it is not.
    """

    paths: RunPaths
    attempt: int
    site: SiteConfig
    job_id: str
    slurm: Slurm
    signals: list[int]
    reason: str = ""
    heard_s: float = 0.0

    def hear(self) -> float | None:
        """Passes a warning on at once, and reads a stop request of others now and then; returns the seconds
        that are left after a warning."""
        if not self._is_warned() and clock.monotonic_s() - self.heard_s < LOOK_S:
            return None
        self.heard_s, left_s = clock.monotonic_s(), None
        request = str(record_of_attempt(self.paths, self.attempt, STOP).get("reason", ""))
        if self._is_warned() and not request:
            job = (self.slurm.show_job(self.job_id, ASK_S) or [{}])[0]
            request = why_warned(job, self.site)
            left_s = max(MARGIN_S, budget_s(job, self.site) - MARGIN_S)
            write_record(self.paths, self.attempt, STOP, {"reason": request, "left_s": left_s})
        self.reason = request or self.reason
        return left_s

    def _is_warned(self) -> bool:
        return signal.SIGUSR2 in self.signals and not self.reason

    def is_killed(self) -> bool:
        """Whether Slurm ends the launcher."""
        return signal.SIGTERM in self.signals

    def is_preempted(self) -> bool:
        """Whether Slurm preempts the job."""
        return is_preempted(self.slurm.show_job(self.job_id, ASK_S))


@dataclass(slots=True)
class Steps:
    """The attempt's steps, a process of srun each, and the time until which they are waited for."""

    running: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    limit_s: float | None = None

    def are_running(self) -> bool:
        """Whether any has not ended."""
        return any(step.poll() is None for step in self.running)

    def limit(self, seconds: float) -> None:
        """Waits for them at most so long from now."""
        limit_s = clock.monotonic_s() + seconds
        self.limit_s = limit_s if self.limit_s is None else min(self.limit_s, limit_s)

    def is_over_limit(self) -> bool:
        """Whether they are not waited for any more."""
        return self.limit_s is not None and clock.monotonic_s() > self.limit_s

    def end(self, number: signal.Signals, patience_s: float) -> None:
        """Sends a signal, and waits for their end."""
        for step in self.running:
            if step.poll() is None:
                step.send_signal(number)
        until_s = clock.monotonic_s() + patience_s
        while clock.monotonic_s() < until_s and self.are_running():
            time.sleep(POLL_S)


@dataclass(slots=True)
class AttemptWatch:
    """One attempt."""

    config: RunConfig
    site: SiteConfig
    allocation: Allocation
    nodes: NodeRecords
    lost: LostNodes
    stop: StopRequest
    followers: Followers
    steps: Steps = field(default_factory=Steps)
    looked_s: float = 0.0

    def run(self) -> Outcome:
        """Starts the steps and waits until they have ended; returns the outcome."""
        self._start()
        try:
            while self.steps.are_running() and not self.stop.is_killed():
                time.sleep(POLL_S)
                self.followers.check()
                with contextlib.suppress(OSError):  # try the run folder again next time
                    if (left_s := self.stop.hear()) is not None:
                        self.steps.limit(left_s)
                    if self._has_lost_nodes():
                        break
                if self.steps.is_over_limit():
                    break
            with_retries(self._look)
            return with_retries(self._outcome)
        finally:
            self._end_steps()

    def look_for_killed_steps(self) -> tuple[set[int], set[int]]:
        """Returns the nodes whose step has begun but not noted its end, and those whose step has noted it."""
        with contextlib.suppress(OSError):
            self._look()
        nodes = self.nodes
        return nodes.records.keys() - nodes.ended.keys() - self.lost.lost, set(nodes.ended)

    def _start(self) -> None:
        paths, attempt, nodes = self.nodes.paths, self.nodes.attempt, self.nodes
        orders = step_orders(
            nodes.components, self.site, self.allocation, paths, attempt=attempt, absent=nodes.absent
        )
        with_retries(lambda: make_within(paths.root, paths.attempt(attempt) / "logs"))
        for order in orders:
            log = paths.log(attempt, f"srun-{order.component}")
            # Not bound to us: a killed srun has its tasks killed, and a task must request the next start.
            start = partial(spawn, list(order.argv), env=os.environ, log=log, dies_with_us=False)
            self.steps.running.append(with_retries(start))

    def _has_lost_nodes(self) -> bool:
        """Reads the nodes' records, if it is time; returns whether the attempt lacks nodes that it needs."""
        interval_s = LOOK_S * max(1.0, self.config.launch.nodes / LOOK_NODES)
        if clock.monotonic_s() - self.looked_s < interval_s:
            return False
        self.looked_s = clock.monotonic_s()
        self._look()
        return bool(self.lost.look() - self.nodes.absent) or bool(self.nodes.blind())

    def _look(self) -> None:
        self.nodes.look()
        self._limit_the_rest()

    def _limit_the_rest(self) -> None:
        """Sets a time limit for the remaining steps once the attempt cannot continue."""
        trainer_nodes, nodes, ended = range(num_trainer_nodes(self.config)), self.nodes, self.nodes.ended
        if nodes.unfit():
            have_all_begun = len(nodes.records) == nodes.num_present
            self.steps.limit(0.0 if have_all_begun else self.site.node_check.limit_s + UNFIT_S)
        elif nodes.have_all_ended():
            self.steps.limit(LAST_SRUN_S)
        elif 0 in ended and ended[0] >= 0:
            self.steps.limit(END_TOGETHER_S)
        elif any(ended.get(index, EXIT_FINISHED) != EXIT_FINISHED for index in trainer_nodes):
            self.steps.limit(ORPHANS_S)

    def _outcome(self) -> Outcome:
        if blind := self.nodes.blind():
            return Outcome(verdict=Verdict.GIVE_UP, reason=blind, exit_code=EXIT_USER_MISTAKE)
        seen = self._seen()
        if not seen.is_killed and not seen.stop and self.nodes.ended.get(0) == EXIT_WILL_CONTINUE:
            self._settle()  # the tasks got SIGTERM, the launcher did not: find out why
            seen = self._seen()
        return outcome_of(seen)

    def _settle(self) -> None:
        until_s, stop = clock.monotonic_s() + SETTLE_S, self.stop
        while clock.monotonic_s() < until_s and not stop.is_killed() and not stop.is_preempted():
            if newest_attempt(self.nodes.paths) > self.nodes.attempt:
                return  # a newer start ended them
            time.sleep(SETTLE_LOOK_S)

    def _seen(self) -> AttemptFacts:
        nodes, stop = self.nodes, self.stop
        dead = frozenset(
            index
            for part in nodes.components
            for index in part.indexes
            if index not in nodes.ended and nodes.is_lost(index)
        ) | (self.lost.lost - nodes.absent)
        roles, unfit = placement_of(self.config), nodes.unfit()
        gone = roles.with_blocks(dead | nodes.absent | unfit.keys())
        return AttemptFacts(
            is_killed=stop.is_killed(),
            stop=stop.reason,
            is_preempted=stop.is_preempted(),
            ended=nodes.ended,
            dead=dead,
            unfit=unfit,
            is_unfit_everywhere=nodes.is_everywhere(unfit),
            trainer_nodes=frozenset(roles.trainer_nodes),
            can_shrink=all(pool - gone for pool in roles.pools.values()),
            cause=reason_of_end(nodes.paths.events, nodes.attempt) or nodes.refusal(),
        )

    def _end_steps(self) -> None:
        """Ends the steps. srun forwards SIGUSR1, so controllers clean up; on SIGTERM it kills its tasks."""
        stages = ((signal.SIGUSR1, 6.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 2.0))
        for number, patience_s in stages[-1:] if self.nodes.have_all_ended() else stages:
            if self.stop.is_killed():
                return  # Slurm does it
            self.steps.end(number, patience_s)
