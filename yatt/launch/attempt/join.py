"""A joining job: its nodes take the places of engine nodes that a run has lost.

`yatt join RUN` submits it, beside the run's own job. It has no trainer ranks and no leader: if it ends, or
its nodes die, the run goes on as after any loss of engine nodes. It looks for free places in whatever attempt
is under way, and ends when the run is finished or given up, or after no place was free for a while.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from yatt import clock
from yatt.adapters.files.files import read_or_none, share_with
from yatt.adapters.files.patience import with_retries
from yatt.adapters.processes.process import spawn
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.run_folder.ledger import (
    ENDED,
    STARTED,
    STOP,
    newest_attempt,
    record_of_attempt,
    run_is_finished,
)
from yatt.adapters.run_folder.run_config import load_run
from yatt.config.check import num_trainer_nodes
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig
from yatt.core.attempts.outcome import CANCEL
from yatt.errors import EXIT_DO_NOT_RESTART, EXIT_FINISHED, EXIT_USER_MISTAKE, ConfigError
from yatt.launch.attempt.images import with_local_image
from yatt.launch.attempt.job import PLAN_S, say_in_log
from yatt.launch.node.allocation import Allocation, allocation_of
from yatt.launch.node.places import claim_exactly, has_ended, is_under_way, life_in_place, newest_claim
from yatt.launch.node.steps import guest_step
from yatt.launch.resolve.plan import Component, JobPlan, components_of, read_job_plan
from yatt.paths import RunPaths

LOOK_S = 2.0
GRACE_S = 15.0
"""How long a place is left to the step that had it, if that claims no later life."""

CLAIMED_S = 60.0
"""How long it is left to whoever has claimed a later life: until that has asked to take part."""

SILENT_S = 120.0
"""A leader whose heartbeat has not changed for this long is gone."""

REST_S = 60.0
"""Pause of a node whose step has ended."""

IDLE_S = 600.0
"""The job ends after no place was free, or no attempt under way, for this long."""

GIVEN_UP = (EXIT_USER_MISTAKE, EXIT_DO_NOT_RESTART)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
STAGES = ((signal.SIGUSR1, 10.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 2.0))
"""Signals to srun, and the seconds before the next one: on the first, controllers clean up and end."""


def guests_part(config: RunConfig, plan: JobPlan, nodes: int) -> Component:
    """Returns the component of a joining job.

    Raises:
        ConfigError: the run has no engine nodes.
    """
    if num_trainer_nodes(config) == config.launch.nodes:
        raise ConfigError(
            "this run has no engine nodes: every node trains, and a trainer node cannot be replaced while "
            "the run goes on. Only runs with placement.mode: disaggregated can be joined."
        )
    return replace(components_of(config, plan.site, plan.layout)[-1], first=0, nodes=nodes)


def run_join(paths: RunPaths) -> int:
    """Runs a joining job to its end; returns the exit code.

    Raises:
        ConfigError: this is not a job, or the run cannot be joined.
    """
    answer_stack_requests(paths.root, "launcher")
    signals: list[int] = []
    for number in ENDING:
        signal.signal(number, lambda received, _frame: signals.append(received))
    plan = with_retries(partial(read_job_plan, paths), limit_s=PLAN_S)
    config = plan.attempt_config(with_retries(partial(load_run, paths)))
    share_with(config.run.share)
    part = guests_part(config, plan, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    allocation = allocation_of(os.environ, (part,))
    site = with_local_image(plan.site, (part,), allocation, frozenset(), say_in_log, lambda: bool(signals))
    places = Places(paths, range(num_trainer_nodes(config), config.launch.nodes))
    guests = Guests(paths, site, part, allocation, places, lambda: bool(signals))
    say_in_log(f"this job ends: {guests.run()}")
    return EXIT_FINISHED


def why_over(paths: RunPaths) -> str:
    """Returns why no attempt follows the newest one: the run is finished, cancelled or given up; else ''.

    Raises:
        OSError: the run folder fails.
    """
    newest = newest_attempt(paths)
    ended = record_of_attempt(paths, newest, ENDED)
    if run_is_finished(paths):
        return "the run is finished"
    if ended and record_of_attempt(paths, newest, STOP).get("reason") == CANCEL:
        return "the run was cancelled"
    return "the run has given up" if ended.get("exit_code") in GIVEN_UP else ""


@dataclass(slots=True)
class Places:
    """The free places of the attempt that is under way."""

    paths: RunPaths
    indexes: range
    attempt: int = 0
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    """For each free place: the newest claim, and since when it is that."""

    beat: tuple[bytes | None, float] = None, 0.0
    """The leader's heartbeat, and since when it is that."""

    @property
    def is_led(self) -> bool:
        """Whether the attempt's leader is alive, as far as is known."""
        return clock.monotonic_s() - self.beat[1] < SILENT_S

    def look(self) -> None:
        """Looks at the newest attempt.

        Raises:
            OSError: the run folder fails.
        """
        newest, now_s = newest_attempt(self.paths), clock.monotonic_s()
        if newest != self.attempt:
            self.attempt, self.seen, self.beat = newest, {}, (None, now_s)
        beat = read_or_none(self.paths.heartbeat(newest))
        self.beat = self.beat if beat == self.beat[0] else (beat, now_s)
        under_way = is_under_way(self.paths, newest) and self.is_led
        for index in self.indexes:
            if not under_way or life_in_place(self.paths, newest, index):
                self.seen.pop(index, None)
                continue
            claimed = newest_claim(self.paths, newest, index)
            if self.seen.get(index, (0, 0.0))[0] != claimed:
                self.seen[index] = claimed, now_s

    def take(self) -> tuple[int, int] | None:
        """Claims a place that nobody else is about to take; returns its node index and the life.

        Raises:
            OSError: the run folder fails.
        """
        for index, (claimed, since_s) in self.seen.items():
            if clock.monotonic_s() - since_s < (GRACE_S if claimed == 1 else CLAIMED_S):
                continue
            self.seen[index] = claimed + 1, clock.monotonic_s()
            if claim_exactly(self.paths, self.attempt, index, claimed + 1):
                return index, claimed + 1
        return None


@dataclass(slots=True)
class Guests:
    """The steps of a joining job: at most one on each of its nodes."""

    paths: RunPaths
    site: SiteConfig
    part: Component
    allocation: Allocation
    places: Places
    is_told: Callable[[], bool]
    steps: "dict[str, tuple[int, subprocess.Popen[bytes]]]" = field(default_factory=dict)
    rests_until_s: dict[str, float] = field(default_factory=dict)
    busy_s: float = field(default_factory=clock.monotonic_s)

    def run(self) -> str:
        """Takes places until the job is told to end, the run is over, or nothing was free for long; returns
        why."""
        try:
            was_over = newest_attempt(self.paths) if why_over(self.paths) else 0
            while not self.is_told():
                with contextlib.suppress(OSError):  # look again
                    self._turn()
                    is_same = self.places.attempt == was_over and not run_is_finished(self.paths)
                    if (why := why_over(self.paths)) and not is_same:
                        return why
                if clock.monotonic_s() - self.busy_s >= IDLE_S:
                    return f"no place was free for {IDLE_S:g} s"
                time.sleep(LOOK_S)
            return "this job was told to end"
        finally:
            self._end(list(self.steps))

    def _turn(self) -> None:
        now_s = clock.monotonic_s()
        self.places.look()
        for host, (attempt, step) in list(self.steps.items()):
            if step.poll() is not None:
                del self.steps[host]
                self.rests_until_s[host] = now_s + REST_S
            elif has_ended(self.paths, attempt) or not self.places.is_led:
                self._end([host])
        self.busy_s = now_s if self.steps else self.busy_s
        for host in self.allocation.hosts[self.part.name]:
            is_idle = host not in self.steps and now_s >= self.rests_until_s.get(host, 0.0)
            if is_idle and (taken := self.places.take()) is not None:
                self._start(host, *taken)

    def _start(self, host: str, index: int, life: int) -> None:
        attempt = self.places.attempt
        absent = set(record_of_attempt(self.paths, attempt, STARTED).get("absent", ())) - {index}
        place = (
            "--run",
            str(self.paths.root),
            "--attempt",
            str(attempt),
            "--indexes",
            str(index),
            "--absent",
            ",".join(map(str, sorted(absent))),
            "--life",
            str(life),
        )
        argv = guest_step(self.part, host, self.site, self.allocation, place)
        log = self.paths.log(attempt, f"srun-node{index}.{life}")
        self.steps[host] = attempt, spawn(list(argv), env=os.environ, log=log, dies_with_us=False)
        say_in_log(f"{host} takes the place of node{index} in attempt {attempt} (life {life})")

    def _end(self, hosts: list[str]) -> None:
        steps = [self.steps.pop(host)[1] for host in hosts]
        for number, patience_s in STAGES:
            for step in steps:
                if step.poll() is None:
                    step.send_signal(number)
            until_s = clock.monotonic_s() + patience_s
            while clock.monotonic_s() < until_s and any(step.poll() is None for step in steps):
                time.sleep(0.1)
