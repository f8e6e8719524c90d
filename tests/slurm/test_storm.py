"""Whatever happens to a run on Slurm, drawn at random: its results do not change, and it has one job.

A schedule is a number of events of all kinds, each at some moment of whatever phase the run is in. After each
the run must get on by itself (after a cancel: by `yatt resume`), and must have been requeued as often as the
event asks for, which is once at most. A few events here; `make soak` has ten schedules of twelve
(`YATT_STORM_SCHEDULES`, `YATT_STORM_EVENTS`). `YATT_STORM_SEED` repeats what was drawn.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S, LOADED, living, wait_for
from tests.seeds import seed_of
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SubmittedRun, metrics_of, weights_of
from tests.slurm.test_lost_machines import hosts
from yatt.adapters.run_folder.ledger import newest_attempt, started_attempts
from yatt.errors import EXIT_WILL_CONTINUE

SCHEDULES = int(os.environ.get("YATT_STORM_SCHEDULES", "1"))
EVENTS = int(os.environ.get("YATT_STORM_EVENTS", "3"))
SEED = seed_of("YATT_STORM_SEED")
ITERATIONS = 20 + 8 * EVENTS
pytestmark = [
    pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(900 + 240 * EVENTS),
]  # fmt: skip

REWARD = """
import threading
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if not (Path(__file__).parent / "hurry").exists():
        threading.Event().wait(0.3)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""
SETTINGS = {
    "run": {"max_attempts_without_progress": 30},
    "trainer": {"total_iterations": ITERATIONS},
    "checkpoint": {"save_every": 1},
}
SETTLED_S = 120.0
AS_WRITTEN_MIN = 10
SAVED_S = 6.0
"""A slurmctld that is killed has forgotten what it has not written yet, new jobs too: it writes every 5 s."""


@dataclass
class Storm:
    """One schedule. `happened` says in words what was done, for whoever reads a failure."""

    cluster: Cluster
    run: SubmittedRun
    draw: random.Random
    happened: list[str] = field(default_factory=list)
    crashed: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    repairs: list[threading.Thread] = field(default_factory=list)

    # ---- events: each gives how often it may have the job requeued ------------------------------

    def worker_killed(self) -> set[int]:
        return self._kill(self.draw.choice(["yatt.trainer", "yatt.rollout", "yatt.reward"]), {0})

    def controller_killed(self) -> set[int]:
        return self._kill("yatt.control", {0})

    def step_killed(self) -> set[int]:
        """Its controller ends with it, so that the node looks lost."""
        return self._kill("yatt.launch.node.step", {0, 1})

    def launcher_killed(self) -> set[int]:
        self.run.controller_is_there()
        os.kill(self.run.launcher, signal.SIGKILL)
        return {1}

    def requeued(self) -> set[int]:
        self.cluster.call("scontrol", "requeue", self.run.job_id)
        return {1}

    def requeued_twice(self) -> set[int]:
        argv = ["scontrol", "requeue", self.run.job_id]
        both = [subprocess.Popen(argv, env=self.cluster.env, stderr=subprocess.DEVNULL) for _ in range(2)]
        assert 0 in {each.wait() for each in both}
        return {1}

    def signal_to_steps(self) -> set[int]:
        self.run.controller_is_there()  # a signal to steps that have not begun reaches nobody
        self.cluster.call("scancel", "--signal=USR2", self.run.job_id)
        return {1}

    def signal_to_batch(self) -> set[int]:
        self.cluster.call("scancel", "--batch", "--signal=USR2", self.run.job_id)
        return {1}

    def preempted(self) -> set[int]:
        sleeps, nodes = self.draw.randint(1, 6), self.draw.randint(2, 4)
        wanted = ("--partition=high", f"--nodes={nodes}", "--exclusive")
        self.cluster.sbatch(f"#!/bin/bash\nsleep {sleeps}\n", *wanted)
        return {1}

    def suspended(self) -> set[int]:
        self.cluster.call("scontrol", "suspend", self.run.job_id)
        time.sleep(self.draw.uniform(1, 12))
        self.cluster.call("scontrol", "resume", self.run.job_id)
        return {0}

    def slurmctld_away(self) -> set[int]:
        how = self.draw.choice(["stop", "kill", "pause"])
        self.happened[-1] += f" ({how})"
        time.sleep(SAVED_S if how == "kill" else 0.0)
        self.cluster.ctld(how)
        time.sleep(self.draw.uniform(1, 8))
        self.cluster.ctld("unpause" if how == "pause" else "start")
        return {0}

    def slurmd_away(self) -> set[int]:
        """For less than SlurmdTimeout: Slurm does not call the node down. It requeues the job all the same if
        the slurmd comes back before it has run any step of it."""
        index, how = self.draw.randrange(4), self.draw.choice(["lost", "pause"])
        node = hosts(self.run)[index]
        had_step = self.run.paths.controller_record(newest_attempt(self.run.paths), index).exists()
        self.happened[-1] += f" ({how} {node})"
        getattr(self.cluster, how)(node)
        time.sleep(self.draw.uniform(1, 6))
        getattr(self.cluster, "unpause" if how == "pause" else "start")(node)
        return {0} if had_step else {0, 1}

    def machine_crashed(self) -> set[int]:
        """An engine node is done without; others cost a start."""
        index = self.draw.randrange(4)
        node = hosts(self.run)[index]
        self.happened[-1] += f" (node{index}, {node})"
        # One that is gone before its step begins is waited for until `launch.start_timeout_s`, in each
        # attempt until Slurm knows: longer than an event may take here.
        entry = lambda: self.run.paths.controller_record(newest_attempt(self.run.paths), index).exists()  # noqa: E731
        wait_for(entry, timeout_s=SETTLED_S, what=f"the step on {node}")
        self.cluster.crash(node)
        self.crashed.add(index)
        self.repairs.append(threading.Thread(target=self._repair, args=(node,), daemon=True))
        self.repairs[-1].start()
        return {0, 1} if index > 1 else {1}

    def _repair(self, node: str) -> None:
        """Once Slurm has seen that it is down: this one cannot tell by its time of boot that it was."""
        for _ in range(300):
            with contextlib.suppress(AssertionError):
                if self.cluster.node_state(node).startswith("DOWN"):
                    self.cluster.start(node)
                    return
            time.sleep(1)

    def time_is_up(self) -> set[int]:
        """The limit is moved to where it is near, and back for the next start."""
        job_id, restarts = self.run.job_id, self.run.restarts(self.run.job_id)
        hours, minutes, seconds = map(int, self.cluster.show_job(int(job_id))["RunTime"].split(":"))
        near = -(-(hours * 3600 + minutes * 60 + seconds) // 60) + 1
        self.cluster.call("scontrol", "update", f"jobid={job_id}", f"TimeLimit={near}")
        wait_for(lambda: self.run.restarts(job_id) > restarts, timeout_s=150, what="the next start")
        self.cluster.call("scontrol", "update", f"jobid={job_id}", f"TimeLimit={AS_WRITTEN_MIN}")
        return {1}

    def cancelled(self) -> set[int]:
        now = ["--now"] if self.draw.random() < 0.5 else []
        done = self.run.yatt("cancel", *now, str(self.run.paths.root), timeout_s=200)
        assert done.returncode == 0, done.stderr
        done = self.run.yatt("resume", str(self.run.paths.root))
        assert done.returncode == 0, done.stderr
        return {0}

    # ---- the schedule ---------------------------------------------------------------------------

    def events(self) -> list[Callable[[], set[int]]]:
        """Every kind once before any comes again; the slow one once at most."""
        kinds = [
            self.worker_killed, self.controller_killed, self.step_killed, self.launcher_killed, self.requeued,
            self.requeued_twice, self.signal_to_steps, self.signal_to_batch, self.preempted, self.suspended,
            self.slurmctld_away, self.slurmd_away, self.machine_crashed, self.cancelled, self.time_is_up,
        ]  # fmt: skip
        self.draw.shuffle(kinds)
        return (kinds + [kind for kind in kinds if kind != self.time_is_up])[:EVENTS]

    def blow(self) -> None:
        for event in self.events():
            time.sleep(self.draw.uniform(0, 5))
            self.happened.append(f"{time.strftime('%H:%M:%S')} step {self.run.step()}: {event.__name__}")
            job_id, before = self.run.job_id, len(started_attempts(self.run.paths))
            if event not in (self.cancelled, self.slurmctld_away):  # all others need an attempt that runs
                wait_for(self._runs, timeout_s=SETTLED_S, what="an attempt to run")
            restarts = self.run.restarts(job_id)
            allowed = event()
            if self.run.job_id != job_id:
                restarts = 0
            self._settle(restarts, before, allowed)
            found = self.run.restarts(self.run.job_id) - restarts
            self.happened[-1] += f": {found} requeues"
            sys.stdout.write(f"{self.happened[-1]}\n")
            assert found in allowed

    def _runs(self) -> bool:
        """The job runs, and its launcher has begun an attempt and lives."""
        if self.cluster.show_job(int(self.run.job_id))["JobState"] != "RUNNING":
            return False
        return bool(started_attempts(self.run.paths)) and Path(f"/proc/{self.run.launcher}").exists()

    def _settle(self, restarts: int, before: int, allowed: set[int]) -> None:
        """Until what was asked for has begun, and often until it got on as well."""
        run = self.run
        if 0 not in allowed:

            def started() -> bool:
                return run.restarts(run.job_id) > restarts and len(started_attempts(run.paths)) > before

            run._wait(started, SETTLED_S, "the next start")
            if self.draw.random() < 0.4:
                return  # the next event comes while this start meets and builds
        run.wait_step(run.step() + 2, SETTLED_S)

    def _kill(self, module: str, allowed: set[int]) -> set[int]:
        def there() -> list[int]:
            return [pid for pid, name in sorted(living(self.run.paths.root).items()) if name == module]

        pid = self.draw.choice(wait_for(there, timeout_s=60, what=module))
        self.happened[-1] += f" ({module})"
        os.kill(pid, signal.SIGKILL)
        return allowed

    # ---- one job --------------------------------------------------------------------------------

    def watch(self, over: threading.Event) -> None:
        """At no moment two jobs of the run that could run."""
        argv = ["squeue", "-h", "-o", "%i|%j|%T|%r"]
        while not over.wait(0.3):
            done = subprocess.run(argv, env=self.cluster.env, capture_output=True, text=True, check=False)
            rows = [line.split("|") for line in done.stdout.splitlines()]
            live = {
                re.split(r"\D", row[0])[0]
                for row in rows
                if row[1].startswith("yatt") and row[2] != "COMPLETING" and row[3] != "Dependency"
            }
            if len(live) > 1:
                self.faults.append(f"{time.strftime('%H:%M:%S')}: {sorted(live)}")


@pytest.fixture(scope="module")
def calm(running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = SubmittedRun(running_cluster, tmp_path_factory.mktemp("calm"), SETTINGS)
    run.wait_finished(run.submit(), timeout_s=20 + 2 * ITERATIONS)
    return {"metrics": metrics_of(run.paths), "weights": weights_of(run.paths)}


@pytest.fixture
def watched(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[int], Storm]]:
    over, threads, made = threading.Event(), [], []

    def make(seed: int) -> Storm:
        run = SubmittedRun(cluster, tmp_path, SETTINGS, reward=REWARD, time_limit_min=AS_WRITTEN_MIN)
        storm = Storm(cluster, run, random.Random(seed))
        made.append(storm)
        threads.append(threading.Thread(target=storm.watch, args=(over,)))
        threads[0].start()
        return storm

    yield make
    over.set()
    for repair in made[0].repairs if made else ():
        repair.join(HANG_S)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("number", range(SCHEDULES))
def test_whatever_happens_the_results_are_the_same(
    watched: Callable[[int], Storm], calm: dict[str, Any], number: int
) -> None:
    seed = SEED + number
    sys.stdout.write(f"YATT_STORM_SEED={seed} YATT_STORM_EVENTS={EVENTS}\n")
    storm = watched(seed)
    run = storm.run
    run.submit()
    try:
        storm.blow()
        run.hurry()
        run.wait_finished(run.job_id, timeout_s=(60 + 2 * ITERATIONS) * LOADED)
        run.check(calm, dead=storm.crashed)
    except BaseException:
        sys.stdout.write("\n".join([*storm.happened, run.launcher_log()]))
        raise
    assert storm.faults == [], "two jobs at a time"
    assert not [
        a
        for a in started_attempts(run.paths)
        if a.ended.get("exit_code") not in (None, 0, 1, EXIT_WILL_CONTINUE)
    ]
