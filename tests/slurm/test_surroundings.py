"""Clocks that jump and differ, and other runs on the same machines."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.runs import RunFile
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, ends, metrics_of
from yatt.adapters.node_local.local_folder import OWNER, new_name
from yatt.adapters.processes.process import Identity

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]

FEW = 4
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
PROLOG = """#!/bin/sh
echo "export LD_PRELOAD={library}"
echo "export FAKETIME_TIMESTAMP_FILE={folder}/$SLURMD_NODENAME"
echo "export FAKETIME_CACHE_DURATION=1"
echo "export FAKETIME_DONT_FAKE_MONOTONIC=1"
echo "export NO_FAKE_STAT=1"
echo "export PYTHONPATH={folder}:$PYTHONPATH"
"""
SLEEP = """
import select
import time

time.sleep = lambda seconds: select.select([], [], [], seconds)
"""
"""libfaketime 0.9.10 fails each time.sleep of Python 3.11 with EINVAL (its issue 426)."""


class Clocks:
    """The wall clock of each virtual node, for its tasks only: offsets in files that they keep reading."""

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SLEEP)
        for node in nodes:
            self.set(node, "+0")
        self.prolog = folder / "prolog.sh"
        self.prolog.write_text(PROLOG.format(library=FAKETIME, folder=folder))
        self.prolog.chmod(0o755)

    def set(self, node: str, offset: str) -> None:
        new = self.folder / f".{node}"
        new.write_text(f"{offset}\n")
        new.replace(self.folder / node)


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed: make slurm")
def test_clocks_that_jump_and_differ_change_nothing(cluster: Cluster, reference, tmp_path):
    """One engine node is an hour behind all the time; the leader's clock jumps ahead and back in mid-run."""
    clocks = Clocks(tmp_path / "clocks", cluster.nodes)
    clocks.set("n3", "-1h")
    # phases are slow with libfaketime, and so is a controller's heartbeat beside other work
    settings = {"trainer": {"total_iterations": FEW}, "launch": {"node_silence_s": 30.0}}
    site = {"srun_args": [f"--task-prolog={clocks.prolog}"]}
    run = SubmittedRun(cluster, tmp_path, settings, reward=SLOW_REWARD, **site)
    job_id = run.submit()
    run.wait_step(1)
    clocks.set("n1", "+1h")
    run.wait_step(2)
    clocks.set("n1", "-1h")
    run.wait_step(3)
    run.hurry()
    run.wait_finished(job_id)
    hours = {event["wall"][11:13] for event in run.events("phase.begin")}
    assert len(hours) >= 3, f"the leader's clock did jump: {hours}"
    assert (run.restarts(job_id), [code for code, _ in ends(run.paths)]) == (0, [0])
    for kind in ("node.lost", "lease.expire", "lease.quarantine", "failure.report", "requeue"):
        assert run.events(kind) == [], kind
    assert metrics_of(run.paths) == reference["metrics"][:FEW]
    run.check_checkpoints()
    run.check_leases()
    run.check_nothing_left(())


def test_two_runs_on_the_same_nodes_and_what_others_left_there(cluster: Cluster, reference, tmp_path):
    shared = RunFile(tmp_path).scratch
    shm = RunFile(tmp_path).shm
    local = {"launch": {"nodes": 4, "scratch_dir": str(shared), "shm_dir": str(shm)}}
    runs = [SubmittedRun(cluster, tmp_path / name, local, reward=SLOW_REWARD) for name in ("one", "two")]
    dead = replace(Identity.of(os.getpid()), begun="0")
    own = [new_name() for _ in range(4)]
    foreign = [f"yatt-{os.getuid()}-0123456789-7-0", "yatt-4711-0123456789-7-0", "data"]
    for name in (*own, *foreign):
        (shared / name).mkdir()
        (shared / name / "server").touch()
    for name in own:
        (shared / name / OWNER).write_text(json.dumps({"owner": asdict(dead)}))
    jobs = [run.submit() for run in runs]
    for run in runs:
        run.wait_step(1)
    for run in runs:
        run.hurry()  # now that both have begun
    for run, job_id in zip(runs, jobs, strict=True):
        run.wait_finished(job_id)
        assert run.restarts(job_id) == 0
    began = [max(event["t"] for event in run.events("attempt.start")) for run in runs]
    over = [max(event["t"] for event in run.events("attempt.end")) for run in runs]
    assert max(began) < min(over), "they ran at the same time"
    assert sorted(path.name for path in shared.iterdir()) == sorted(foreign)
    for run in runs:
        run.check(reference)
