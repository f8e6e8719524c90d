"""Slurm takes the nodes away: the run saves, is requeued once, and goes on where it was."""

import json
import os
import signal
from datetime import datetime

import pytest

from tests.runs import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SubmittedRun, ends
from yatt.adapters.run_folder.ledger import started_attempts

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]

HIGH = "#!/bin/bash\nsleep 6\n"


def test_a_preempted_run_saves_and_comes_back_under_the_same_id(cluster: Cluster, reference, tmp_path):
    run = SubmittedRun(cluster, tmp_path)
    job_id = run.submit()
    run.wait_step(3)
    cluster.sbatch(HIGH, "--partition=high", "--nodes=3", "--exclusive")
    run.wait_finished(job_id)
    first, second = started_attempts(run.paths)
    assert ends(run.paths)[0] == (75, "preempted")
    assert second.started["committed"] == first.ended["committed"] >= 3, "nothing that was done is lost"
    assert (second.started["job"], second.started["restarts"]) == (job_id, 1)
    assert run.restarts(job_id) == 1
    assert run.yatt("report", str(run.paths.root)).returncode == 0
    page = (run.paths.root / "report.html").read_text()
    assert f"{job_id}: first start." in page
    assert f"{job_id}: requeued, start 2." in page
    account = json.loads(run.yatt("status", str(run.paths.root), "--json").stdout)["goodput"]
    assert account["seconds"]["queue"] > 5, "the job that preempted it ran for six seconds"
    assert account["seconds"]["not running"] == 0
    assert sum(account["seconds"].values()) == pytest.approx(account["wall_s"])
    submitted, again = (datetime.fromisoformat(each.started["submitted"]) for each in (first, second))
    assert submitted < datetime.fromisoformat(first.started["began"]) < again, "Slurm queued it again"
    run.check(reference)


def test_a_preemption_before_the_launcher_is_there_is_followed_by_the_next_start(
    cluster, reference, tmp_path
):
    """Slurm calls a job FAILED that ends by itself in the grace time, and does not queue it again."""
    run = SubmittedRun(cluster, tmp_path, setup=[f"touch {tmp_path}/begun", "sleep 3"])
    job_id = run.submit()
    wait_for((tmp_path / "begun").exists, timeout_s=60, what="the setup lines to begin")
    cluster.sbatch(HIGH, "--partition=high", "--nodes=5", "--exclusive")
    run.wait_finished(job_id)
    assert run.restarts(job_id) == 1
    first = [
        each.ended for each in started_attempts(run.paths) if each.started["restarts"] == 0 and each.ended
    ]
    assert {str(ended["reason"]) for ended in first} <= {"preempted"}, "the missed warning was found out"
    run.check(reference)


def test_a_storm_of_signals_is_one_stop(cluster: Cluster, reference, tmp_path):
    run = SubmittedRun(cluster, tmp_path)
    job_id = run.submit()
    run.wait_step(2)
    launcher = started_attempts(run.paths)[0].started["pid"]
    for number in (signal.SIGUSR2, signal.SIGCONT, signal.SIGUSR2, signal.SIGUSR2):
        os.kill(launcher, number)
    for node in range(4):
        os.kill(run.controller(node), signal.SIGTERM)
    run.wait_finished(job_id)
    assert len(started_attempts(run.paths)) == 2
    assert run.restarts(job_id) == 1
    run.check(reference)


def test_a_finished_run_is_not_submitted_again_and_ends_at_once_if_it_is_requeued(
    cluster: Cluster, reference, tmp_path
):
    run = SubmittedRun(cluster, tmp_path, {"run": {"id": "finished"}})
    job_id = run.submit()
    run.wait_finished(job_id)
    before = len(started_attempts(run.paths))
    again = run.yatt("submit", str(run.config), "--site", str(run.site))
    assert (again.returncode, cluster.squeue()) == (0, [])
    assert "is finished: nothing to do" in again.stdout
    cluster.call("scontrol", "requeue", job_id)
    wait_for(lambda: run.restarts(job_id) == 1, what="the requeue")
    cluster.wait_state(int(job_id), "COMPLETED", timeout_s=60)
    assert "is finished: nothing to do" in run.launcher_log()
    assert len(started_attempts(run.paths)) == before, "no attempt was claimed, so nothing was started"
    run.check(reference)
