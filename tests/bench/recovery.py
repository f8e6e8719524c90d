"""How soon faults are seen and mended, on a real test cluster: one run a repetition, hurt again and again.

Times are wall clock stamps of one machine: the injection's here, the rest from the run's events and ledger.
Slurm's share is what lies between its being asked for a new start and that start's first process.
"""

import os
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.bench.quiet import Foreign
from tests.runs import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SubmittedRun
from yatt.adapters.run_folder.ledger import started_attempts
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.store.store import FolderStore

REPETITIONS = int(os.environ.get("RECOVERY_REPETITIONS", "3"))
NODES, SPARE = 5, 1
SETTINGS: dict[str, Any] = {
    "launch": {"nodes": NODES, "node_silence_s": 10.0},
    "placement": {"mode": "disaggregated", "trainer_nodes": 2},
    "trainer": {"total_iterations": 100_000},
    "checkpoint": {"save_every": 5, "keep": 3},
}
HIGH = "#!/bin/bash\nsleep 3\n"
LIMIT_S = 240.0
ROWS = (
    ("start", "launcher's process to the first phase, 5 nodes: all controllers met"),
    ("start workers", "then to the first rollout: engines and trainer come up (imports, building)"),
    ("engine death", "SIGKILL of an engine to its controller's word of it"),
    ("engine again", "SIGKILL of an engine to its next process"),
    ("hang", "SIGSTOP of an engine to the end of its lease"),
    ("hang again", "SIGSTOP of an engine to its next process, the hung one killed"),
    ("controller death", "SIGKILL of a training node's controller to the word of the one who started it"),
    ("controller again", "the same to the next attempt"),
    ("preemption saved", "notice at the leader to the commit and the attempt's end"),
    ("preemption asked", "attempt's end to Slurm's being asked for the next start"),
    ("Slurm's restart", "Slurm asked to the launcher's new process (cred_expire 5 s, the other job 3 s)"),
    ("our restart", "the launcher's new process to the first rollout"),
    ("our share", "notice at the leader to Slurm asked, and new process to first rollout"),
    ("node death", "crash of an engine node to node.lost"),
    ("zombie", "crash of the batch node to a survivor's requeue"),
)
TARGETS = (
    ("engine death", 1.0), ("controller death", 1.0), ("hang again", 30.0), ("node death", 15.0),
    ("our share", 15.0), ("zombie", 60.0), ("start", 10.0),
)  # fmt: skip


def wall_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def began_s(pid: int) -> float:
    """When a process began, as wall clock."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    boot_s = float(re.search(r"^btime (\d+)", Path("/proc/stat").read_text(), re.M)[1])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    boot_s = max(boot_s, time.time() - uptime_s)  # btime has whole seconds
    return boot_s + ticks / os.sysconf("SC_CLK_TCK")


class Drill:
    """One run and what is done to it; `took` collects seconds by row."""

    def __init__(self, cluster: Cluster, folder: Path, took: dict[str, list[float]]) -> None:
        self.cluster, self.took = cluster, took
        self.run = SubmittedRun(cluster, folder, SETTINGS)
        self.job_id = self.run.submit()
        self.attempt = 0

    def event_s(self, kind: str, after_s: float, **fields: Any) -> float:
        """When the first such event after `after_s` happened."""

        def found() -> float | None:
            times = (wall_s(e["wall"]) for e in self.run.events(kind, **fields))
            return next((at_s for at_s in times if at_s > after_s), None)

        at_s: float = wait_for(found, timeout_s=LIMIT_S, what=f"{kind} {fields}")
        return at_s

    def note(self, row: str, seconds: float) -> None:
        self.took[row].append(seconds)
        print(f"    {row}: {seconds:.2f} s", flush=True)

    def begun(self) -> tuple[float, float, float]:
        """The next attempt's launcher, first phase and first rollout."""
        self.attempt += 1
        self.run.wait_attempts(self.attempt, LIMIT_S)
        launcher_s = began_s(self.run.launcher)
        join_s = self.event_s("phase.begin", 0.0, attempt=self.attempt, phase="join")
        rollout_s = self.event_s("phase.begin", 0.0, attempt=self.attempt, phase="rollout")
        self.run.wait_step(started_attempts(self.run.paths)[-1].started["committed"] + 2, LIMIT_S)
        return launcher_s, join_s, rollout_s

    def start(self) -> None:
        launcher_s, join_s, rollout_s = self.begun()
        self.note("start", join_s - launcher_s)
        self.note("start workers", rollout_s - join_s)

    def engine(self) -> None:
        hit_s = self._hit(self.run.pid("rollout-n3s0"), signal.SIGKILL)
        self.note("engine death", self.event_s("worker.end", hit_s, node=3) - hit_s)
        self.note("engine again", self.event_s("worker.start", hit_s, node=3) - hit_s)

    def hang(self) -> None:
        wait_for(lambda: self.run.pid("rollout-n2s0"), timeout_s=LIMIT_S, what="the engine")
        hit_s = self._hit(self.run.pid("rollout-n2s0"), signal.SIGSTOP)
        self.note("hang", self.event_s("lease.expire", hit_s, slab="n2s0") - hit_s)
        self.note("hang again", self.event_s("worker.start", hit_s, node=2) - hit_s)

    def controller(self) -> None:
        entry = self.run.paths.controller_record(self.attempt, 1)
        hit_s = self._hit(self.run.controller(1), signal.SIGKILL)
        wait_for(lambda: '"ended"' in entry.read_text(), timeout_s=LIMIT_S, what="the entry's end")
        self.note("controller death", entry.stat().st_mtime - hit_s)
        self.run.wait_attempts(self.attempt + 1, LIMIT_S)
        self.note("controller again", wall_s(started_attempts(self.run.paths)[-1].started["wall"]) - hit_s)
        self.begun()

    def preemption(self) -> None:
        attempt, asked_s = self.attempt, time.time()
        self.cluster.sbatch(HIGH, "--partition=high", f"--nodes={1 + SPARE}", "--exclusive")
        notice_s = self.event_s("signal", asked_s, attempt=attempt)
        saved_s = self.event_s("attempt.end", notice_s, attempt=attempt)
        launcher_s, _, rollout_s = self.begun()
        requeued_s = wall_s(re.findall(r"^(\S+) yatt: .*: requeued$", self.run.launcher_log(), re.M)[-1])
        self.note("preemption saved", saved_s - notice_s)
        self.note("preemption asked", requeued_s - saved_s)
        self.note("Slurm's restart", launcher_s - requeued_s)
        self.note("our restart", rollout_s - launcher_s)
        self.note("our share", requeued_s - notice_s + rollout_s - launcher_s)

    def engine_node(self) -> None:
        gone = self.hosts()[-1]
        hit_s = time.time()
        self.cluster.crash(gone)
        self.note("node death", self.event_s("node.lost", hit_s, node=NODES - 1) - hit_s)
        self.cluster.start(gone)

    def batch_node(self) -> None:
        hit_s = time.time()
        self.cluster.crash(self.hosts()[0])
        self.note("zombie", self.event_s("requeue", hit_s) - hit_s)
        self.begun()

    def hosts(self) -> list[str]:
        names = started_attempts(self.run.paths)[-1].started["hosts"]
        return [*names["trainer"], *names["engines"]]

    def verdict(self) -> dict[str, int]:
        """What must be exact: requeues, and stale writes that count."""
        self.run.check_checkpoints()
        stale = Checkpoints(FolderStore(self.run.paths.root / "checkpoints"), 0).newest().stale
        return {"requeues": self.run.restarts(self.job_id), "stale": len(stale)}

    def _hit(self, pid: int, number: signal.Signals) -> float:
        hit_s = time.time()
        os.kill(pid, number)
        return hit_s


@contextmanager
def test_cluster() -> Iterator[Cluster]:
    made = Cluster(NODES=NODES + SPARE, GRACE=20, KILLWAIT=5, SLURMD_TIMEOUT=20)
    try:
        yield made.up()
    finally:
        made.down()


def drill(cluster: Cluster, took: dict[str, list[float]]) -> dict[str, int]:
    """One repetition: two starts by Slurm besides the first are expected."""
    folder = Path(tempfile.mkdtemp(prefix="yatt-bench-"))
    try:
        one = Drill(cluster, folder, took)
        for step in (
            one.start, one.engine, one.hang, one.controller, one.preemption, one.engine_node, one.batch_node,
        ):  # fmt: skip
            print(f"  {step.__name__}", flush=True)
            step()
        found = one.verdict()
    finally:
        cluster.reset()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def run() -> dict[str, Any]:
    took: dict[str, list[float]] = defaultdict(list)
    foreign, found = Foreign(), []
    with test_cluster() as cluster:
        for number in range(REPETITIONS):
            print(f"  repetition {number + 1}", flush=True)
            found.append(drill(cluster, took))
    targets = [_target(row, limit_s, took) for row, limit_s in TARGETS]
    requeues, stale = [f["requeues"] for f in found], [f["stale"] for f in found]
    targets += [
        {"what": "requeues of a preemption and a lost batch node", "target": "2",
         "value": ", ".join(map(str, requeues)), "met": set(requeues) == {2}},
        {"what": "commits of a former start that count", "target": "0",
         "value": str(sum(stale)), "met": not any(stale)},
    ]  # fmt: skip
    return {
        "title": "Recovery on Slurm",
        "how": f"A run of {NODES} virtual nodes (2 train, 3 run engines) on a real Slurm of {NODES + SPARE}, "
        f"all on this machine; {REPETITIONS} repetitions, each hurt in every way in turn. Silence of a node "
        "10 s, lease 10 s, as set by default. Slurm waits 5 s (cred_expire) before it starts a requeued job.",
        "head": ["what", "p50", "slowest"],
        "rows": [
            [f"{row}: {what}", f"{statistics.median(took[row]):.2f} s", f"{max(took[row]):.2f} s"]
            for row, what in ROWS
        ],
        "targets": targets,
        "notes": [
            f"{foreign.share():.0%} of the machine's cores were used by processes that the benchmark did "
            "not start itself: the cluster's jobs, which is nearly all, and whatever else ran. Starting "
            "workers is importing torch, megatron-core and the engine, here 9 processes on 2 cores."
        ],
    }


def _target(row: str, limit_s: float, took: dict[str, list[float]]) -> dict[str, Any]:
    p50 = statistics.median(took[row])
    return {
        "what": f"{row}, p50",
        "target": f"<= {limit_s:g} s",
        "value": f"{p50:.2f} s",
        "met": p50 <= limit_s,
    }
