"""Slurm refuses, is away, is asked twice, or runs two starts at once: the run goes on exactly once."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.runs import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ITERATIONS, SLOW_REWARD, SubmittedRun, ends
from yatt.adapters.run_folder.ledger import started_attempts
from yatt.adapters.slurm.requeue import Requeue
from yatt.adapters.slurm.slurm import Slurm
from yatt.core.attempts.deadman import Job
from yatt.paths import RunPaths

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]

HIGH = "#!/bin/bash\nsleep 6\n"
PAUSE_S = 15.0


def test_two_requeues_at_once_are_one_new_start(cluster: Cluster, reference, tmp_path):
    """The administrator asks while the launcher is about to."""
    run = SubmittedRun(cluster, tmp_path)
    job_id = run.submit()
    run.wait_step(2)
    os.kill(run.launcher, signal.SIGUSR2)
    run.wait_event("attempt.end", attempt=1)
    # Refused if the launcher was faster.
    subprocess.run(["scontrol", "requeue", job_id], env=cluster.env, capture_output=True, check=False)
    run.wait_finished(job_id)
    assert run.restarts(job_id) == 1
    assert [attempt.started["job"] for attempt in started_attempts(run.paths)] == [job_id, job_id]
    assert cluster.squeue() == [], "no successor was chained beside the requeue"
    assert "continues the run" not in run.launcher_log()
    run.check(reference)


@pytest.mark.parametrize("mode", ["auto", "requeue"])
def test_a_requeue_refused_because_another_was_first_is_no_reason_to_chain(cluster: Cluster, tmp_path, mode):
    job_id = cluster.sbatch("#!/bin/bash\nsleep 100\n", "--requeue")
    cluster.wait_state(job_id, "RUNNING")
    requeue = Requeue(
        paths=RunPaths(tmp_path),
        attempt=1,
        job_id=str(job_id),
        restarts=0,
        mode=mode,
        slurm=Slurm(cluster.env),
    )
    assert requeue.state() is Job.SAME
    cluster.call("scontrol", "requeue", str(job_id))
    assert requeue.state() is Job.OVER
    assert requeue.succeed([], {}).code == 0
    assert [row["id"] for row in cluster.squeue()] == [str(job_id)]


def test_a_controller_that_is_down_refuses_nothing(cluster: Cluster, tmp_path):
    job_id = cluster.sbatch("#!/bin/bash\nsleep 100\n", "--requeue")
    cluster.wait_state(job_id, "RUNNING")
    requeue = Requeue(
        paths=RunPaths(tmp_path), attempt=1, job_id=str(job_id), restarts=0, slurm=Slurm(cluster.env)
    )
    cluster.ctld("stop")
    reply = requeue.succeed([], {})
    assert reply.is_unreachable, reply
    cluster.ctld("start")
    wait_for(lambda: requeue.state() is Job.SAME, what="the job to be known again")
    assert requeue.succeed([], {}).code == 0
    assert requeue.state() is Job.OVER
    assert [row["id"] for row in cluster.squeue()] == [str(job_id)]


def test_slurm_is_away_when_the_warning_comes(cluster: Cluster, reference, tmp_path):
    """The run saves at once, asks again until Slurm is back, and is requeued once, though Slurm then finds
    every request that was given up as well."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(2)
    cluster.ctld("pause")
    os.kill(run.launcher, signal.SIGUSR2)
    run.wait_event("attempt.end", attempt=1)
    run.wait_said("the next start could not be requested")
    launcher = Path(f"/proc/{run.launcher}")
    assert launcher.exists(), "whoever ends in the grace is not requeued"
    run.hurry()
    cluster.ctld("unpause")
    run.wait_finished(job_id)
    assert ends(run.paths)[0] == (75, "warned by Slurm")
    assert (run.restarts(job_id), len(started_attempts(run.paths))) == (1, 2)
    run.check(reference)


def test_slurm_stands_still_in_mid_run(cluster: Cluster, reference, tmp_path):
    """For the ten slow iterations that are left."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(1)
    began_s = time.monotonic()
    cluster.ctld("pause")
    run.wait_step(ITERATIONS - 1)
    assert time.monotonic() - began_s > PAUSE_S
    cluster.ctld("unpause")
    run.wait_finished(job_id)
    assert (run.restarts(job_id), [code for code, _ in ends(run.paths)]) == (0, [0])
    assert run.events("node.lost") == []
    run.check(reference)


def test_a_job_without_scontrol_is_requeued_by_slurm_itself(cluster: Cluster, reference, tmp_path):
    """Nothing can be asked from inside: a crash costs an attempt all the same, a preemption a requeue."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").symlink_to(shutil.which("srun"))
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD, setup=[f"export PATH={tools}"])
    job_id = run.submit()
    run.wait_step(1)
    os.kill(run.controller(1), signal.SIGKILL)
    run.wait_attempts(2)
    assert "scontrol is not on the PATH" in run.launcher_log()
    run.wait_step(started_attempts(run.paths)[1].started["committed"] + 1)
    cluster.sbatch(HIGH, "--partition=high", "--nodes=3", "--exclusive")
    run.wait_said("the next start could not be requested: scontrol is not on the PATH")
    run.wait_attempts(3)
    run.hurry()
    run.wait_finished(job_id)
    assert [code for code, _ in ends(run.paths)] == [1, 75, 0]
    assert (
        started_attempts(run.paths)[2].started["committed"]
        == started_attempts(run.paths)[1].ended["committed"]
    )
    assert (run.restarts(job_id), len(started_attempts(run.paths))) == (1, 3)
    run.check(reference)


def test_a_second_job_of_the_same_run_takes_it_over(cluster: Cluster, reference, tmp_path):
    """As a successor that starts while its predecessor still lives. The newer claim of an attempt decides."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    first_id = run.submit()
    run.wait_step(2)
    script = tmp_path / "again.sh"
    cluster.call("scontrol", "write", "batch_script", first_id, str(script))
    second_id = cluster.call("sbatch", "--parsable", "--hold", str(script)).split(";")[0]
    pickles = run.paths.submitit
    shutil.copy2(pickles / f"{first_id}_submitted.pkl", pickles / f"{second_id}_submitted.pkl")
    cluster.call("scontrol", "release", second_id)
    run.wait_attempts(2)
    over = cluster.wait_state(int(first_id), "FAILED", "COMPLETED", timeout_s=60)
    assert (over["ExitCode"], over["Restarts"]) == ("75:0", "0")
    run.hurry()
    run.wait_finished(second_id)
    assert [attempt.started["job"] for attempt in started_attempts(run.paths)] == [first_id, second_id]
    assert ends(run.paths)[1] == (0, "finished")
    assert "a newer start of this run exists: this one ends" in run.launcher_log()
    assert run.restarts(second_id) == 0
    run.check(reference)
