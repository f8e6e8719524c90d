"""The batch process is killed, as the kernel does for memory: Slurm ends the job, and the run goes on."""

import pytest

from tests.runs import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SubmittedRun, ends
from yatt.adapters.run_folder.ledger import started_attempts

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("layout", ["het", "flat"])
def test_a_killed_launcher_is_followed_by_the_next_start(cluster: Cluster, reference, tmp_path, layout: str):
    run = SubmittedRun(cluster, tmp_path, layout=layout)
    job_id = run.submit()
    run.wait_step(3)
    cluster.call("scancel", "--signal=KILL", "--batch", job_id)
    run.wait_attempts(2)
    run.wait_finished(job_id)
    assert [code for code, _ in ends(run.paths)] == [None, 0]
    assert run.restarts(job_id) == 1
    assert started_attempts(run.paths)[1].started["committed"] >= 2
    logs = (run.paths.attempt(1) / "logs").glob("node*.log")
    assert sum(log.read_text().count("the launcher was killed: requeued") for log in logs) == 1
    assert cluster.squeue() == []
    run.check(reference)


def test_where_requeues_are_forbidden_a_successor_is_submitted(cluster: Cluster, reference, tmp_path):
    run = SubmittedRun(cluster, tmp_path)
    first_id = run.submit()
    run.wait_step(2)
    cluster.call("scontrol", "update", f"jobid={first_id}", "Requeue=0")
    cluster.call("scancel", "--signal=KILL", "--batch", first_id)
    run.wait_attempts(2)
    next_id = started_attempts(run.paths)[1].started["job"]
    assert next_id != first_id
    run.wait_finished(next_id)
    assert cluster.squeue() == []
    assert (len(started_attempts(run.paths)), run.restarts(next_id)) == (2, 0)
    run.check(reference)


def test_a_job_that_its_user_ends_stays_ended(cluster: Cluster, tmp_path):
    run = SubmittedRun(cluster, tmp_path)
    job_id = run.submit()
    run.wait_step(2)
    cluster.call("scancel", job_id)
    wait_for(lambda: cluster.squeue() == [], timeout_s=60, what="the job to be gone")
    assert cluster.show_job(int(job_id))["JobState"] == "CANCELLED"
    assert (len(started_attempts(run.paths)), run.restarts(job_id)) == (1, 0)
    run.check_nothing_left(())
