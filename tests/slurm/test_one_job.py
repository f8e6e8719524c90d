"""A run has one job, and everybody knows which: whatever people change, and however it was submitted."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import ROOT, command, popen, start, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun
from yatt.adapters.slurm.slurm import CALL_LIMIT_S

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]


def blocked(cluster: Cluster) -> int:
    """A job on every node, so that others wait."""
    return cluster.sbatch("#!/bin/bash\nsleep 3000\n", "--nodes=5", "--exclusive", "--partition=high")


def status_of(run: SubmittedRun) -> str:
    return run.yatt("status", str(run.paths.root)).stdout


def test_four_submits_at_once_queue_one_job(cluster: Cluster, tmp_path) -> None:
    blocked(cluster)
    run = SubmittedRun(cluster, tmp_path, {"run": {"id": "one-id"}})
    argv = command("submit", str(run.config), "--site", str(run.site))
    env = {**cluster.env, "XDG_STATE_HOME": str(tmp_path / "state")}
    several = [
        popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(4)
    ]
    said = [process.communicate(timeout=300)[0] for process in several]
    assert sorted(process.returncode for process in several) == [0, 2, 2, 2], said
    assert len({row["id"].split("+")[0] for row in cluster.squeue() if row["name"].startswith("yatt")}) == 1
    assert run.paths.config.is_file()
    assert run.job_id in status_of(run)


def test_names_and_comments_are_no_identity(cluster: Cluster, tmp_path) -> None:
    """One name has all that could be misread in what Slurm prints."""
    blocked(cluster)
    name = "sp lr=1e-6 JobState=FAILED"
    run = SubmittedRun(cluster, tmp_path, {"run": {"dir": str(tmp_path / name)}})
    job_id = run.submit()
    cluster.call("scontrol", "update", f"jobid={job_id}", "comment=the site's own", "name=renamed")
    assert "waiting" in status_of(run)
    listed = run.yatt("list").stdout
    assert job_id in listed
    assert "PENDING" in listed
    again = run.yatt("submit", str(run.config), "--site", str(run.site))
    assert again.returncode == 2
    assert f"job {job_id} of this run is PENDING already" in again.stderr
    assert run.yatt("resume", str(run.paths.root)).returncode == 2
    assert run.yatt("cancel", str(run.paths.root)).returncode == 0
    assert [row for row in cluster.squeue() if row["id"].startswith(job_id)] == []


def test_a_job_submitted_by_hand_is_known_while_it_waits_and_when_it_runs(cluster: Cluster, tmp_path) -> None:
    blocking = blocked(cluster)
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    prepared = run.yatt("submit", "--prepare", str(run.config), "--site", str(run.site))
    assert prepared.returncode == 0, prepared.stderr
    path = f"PATH={Path(sys.executable).parent}{os.pathsep}{cluster.env['PATH']}"
    script = str(ROOT / "slurm" / "train-het.sbatch")
    (name,) = [word for word in prepared.stdout.split() if word.startswith("--job-name=yatt-")]
    said = cluster.call("env", path, "sbatch", "--parsable", name, script, str(run.paths.root), cwd=tmp_path)
    job_id = said.split(";")[0]
    assert "waiting" in status_of(run)
    assert job_id in run.yatt("list").stdout
    assert f"job {job_id} of this run is PENDING already" in run.yatt("resume", str(run.paths.root)).stderr
    cluster.call("scancel", str(blocking))
    run.wait_step(1)
    assert run.job_id == job_id
    assert "running" in status_of(run)
    stopped = run.yatt("cancel", str(run.paths.root))
    assert stopped.returncode == 0, stopped.stderr
    wait_for(lambda: cluster.squeue() == [], timeout_s=60, what="the job to be gone")


def test_a_run_that_goes_on_here_is_not_submitted_beside_it(cluster: Cluster, tmp_path) -> None:
    run = SubmittedRun(cluster, tmp_path, {"run": {"id": "local"}}, reward=SLOW_REWARD)
    local = start("run", str(run.config))
    try:
        run.wait_step(1)
        refused = run.yatt("submit", str(run.config), "--site", str(run.site))
        assert refused.returncode == 2
        assert f"in process {local.pid} of this machine already" in refused.stderr
        assert cluster.squeue() == []
    finally:
        run.hurry()
        local.communicate(timeout=400)


def test_a_list_of_runs_does_not_wait_for_slurm(cluster: Cluster, tmp_path) -> None:
    """One deadline for all runs. A start of Python is in the time as well."""
    blocked(cluster)
    runs = [SubmittedRun(cluster, tmp_path / f"r{number}") for number in range(6)]
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    for run in runs:
        assert run.yatt("submit", str(run.config), "--site", str(run.site), **env).returncode == 0
    began_s = time.monotonic()
    listed = runs[0].yatt("list", **env)
    usual_s = time.monotonic() - began_s
    assert listed.stdout.count("PENDING") == 6
    cluster.ctld("pause")
    try:
        began_s = time.monotonic()
        silent = runs[0].yatt("list", **env)
        took_s = time.monotonic() - began_s
        assert "UNKNOWN" in runs[0].yatt("status", str(runs[0].paths.root)).stdout
        undone = runs[0].yatt("cancel", str(runs[0].paths.root))
    finally:
        cluster.ctld("unpause")
    assert undone.returncode == 1
    assert "Slurm does not answer, so job" in undone.stderr
    assert silent.returncode == 0
    assert "Slurm does not answer" in silent.stderr
    assert silent.stdout.count("UNKNOWN") == 6
    assert all(str(run.paths.root) in silent.stdout for run in runs)
    assert took_s < 2 * usual_s + 3 * CALL_LIMIT_S, "one deadline, not one a run: of 20 s each it was"
