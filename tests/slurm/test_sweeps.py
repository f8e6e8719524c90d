"""Several runs as one command, jobs that wait for others, a shell beside workers, the call from Python."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import living, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun
from yatt.adapters.run_folder.ledger import run_is_finished, started_attempts
from yatt.adapters.slurm.job_note import noted_job
from yatt.paths import RunPaths

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]
ONE_NODE = {
    "launch": {"nodes": 1, "node_silence_s": 6.0},
    "placement": {"mode": "colocated", "trainer_nodes": 0},
    "trainer": {"total_iterations": 3},
}


def job_of(paths: RunPaths) -> str:
    noted = noted_job(paths)
    return noted.job if noted else ""


@pytest.mark.slow
def test_a_sweep_of_four_runs_survives_a_preemption_and_a_cancel(cluster: Cluster, tmp_path: Path) -> None:
    blocking = cluster.sbatch("#!/bin/bash\nsleep 3000\n", "--nodes=5", "--exclusive", "--partition=high")
    run = SubmittedRun(cluster, tmp_path, ONE_NODE, reward=SLOW_REWARD, exclusive=True)
    sweep = ["--sweep", "optimizer.lr=0.001,0.002", "--sweep", "run.seed=1,2"]
    done = run.yatt("submit", str(run.config), "--site", str(run.site), *sweep, timeout_s=240)
    assert done.returncode == 0, done.stderr
    runs = [RunPaths(folder) for folder in sorted(run.file.run_dir.iterdir())]
    assert len({job_of(paths) for paths in runs}) == 4
    listed = run.yatt("list", str(run.file.run_dir))
    assert listed.stdout.count("PENDING") == 4
    again = run.yatt("submit", str(run.config), "--site", str(run.site), *sweep, timeout_s=240)
    assert again.returncode == 0
    assert again.stdout.count("of this run is PENDING already") == 4
    assert len(cluster.squeue()) == 5, "nothing was queued twice"
    cancelled = runs.pop()
    assert run.yatt("cancel", str(cancelled.root)).returncode == 0
    run.hurry()
    cluster.call("scancel", str(blocking))
    wait_for(lambda: started_attempts(runs[0]), timeout_s=100, what="the first run to begin")
    wait_for(
        lambda: all(started_attempts(paths) for paths in runs[:2]), timeout_s=100, what="two runs to begin"
    )
    cluster.sbatch("#!/bin/bash\nsleep 3\n", "--partition=high", "--exclusive", "--nodes=5")

    def over() -> bool:
        states = [cluster.show_job(int(job_of(paths)))["JobState"] for paths in runs]
        assert "FAILED" not in states, states
        return all(map(run_is_finished, runs))

    wait_for(over, timeout_s=450, what="three runs to finish")
    starts = [int(cluster.show_job(int(job_of(paths)))["Restarts"]) for paths in runs]
    assert sum(starts) >= 1, "one at least was preempted"
    listed = run.yatt("list", str(run.file.run_dir)).stdout
    assert listed.count("finished") == 3
    assert "CANCELLED" in listed
    texts = {paths.config.read_text() for paths in runs}
    assert len(texts) == 3


def test_a_run_waits_for_another_and_lets_people_in(cluster: Cluster, tmp_path: Path) -> None:
    long = {**ONE_NODE, "trainer": {"total_iterations": 30}}  # until people have looked, and it may hurry
    first = SubmittedRun(cluster, tmp_path / "first", long, reward=SLOW_REWARD)
    first_id = first.submit()
    second = SubmittedRun(cluster, tmp_path / "second", ONE_NODE)
    argv = ["submit", str(second.config), "--site", str(second.site), "--after"]
    assert "neither a job id nor a run folder" in second.yatt(*argv, str(tmp_path)).stderr
    done = second.yatt(*argv, str(first.paths.root))
    assert done.returncode == 0, done.stderr
    job = cluster.show_job(int(second.job_id))
    assert (job["JobState"], job["Dependency"]) == ("PENDING", f"afterany:{first_id}(unfulfilled)")
    assert (
        "waits for the job that it depends on to end" in second.yatt("status", str(second.paths.root)).stdout
    )
    first.wait_step(1)
    inside = first.yatt(
        "attach", str(first.paths.root), "--do", "printenv", "SLURM_JOB_ID", "SLURMD_NODENAME"
    )
    assert inside.stdout.split()[0] == first_id, inside.stderr
    none = first.yatt("attach", str(first.paths.root), "3", "--do", "true")
    assert (none.returncode, "node 3 has no controller" in none.stderr) == (2, True)
    not_yet = second.yatt("attach", str(second.paths.root))
    assert (not_yet.returncode, "has no running job" in not_yet.stderr) == (2, True)
    assert living(first.paths.root), "whoever looked in has ended nothing"
    first.hurry()
    first.wait_finished(first_id)
    second.wait_finished(second.job_id)
    started = cluster.show_job(int(second.job_id))["StartTime"]
    assert started >= cluster.show_job(int(first_id))["EndTime"]


CALL = """
import sys
import yatt

job = yatt.submit(
    sys.argv[1], sys.argv[2], "trainer.total_iterations=2", time_limit_min=8, nice=3, mail_type="END",
)
print(job.job_id, job.state, flush=True)
print(job.result(), job.state, flush=True)
"""


def test_somebody_who_knows_submitit_submits_from_python(cluster: Cluster, tmp_path: Path) -> None:
    run = SubmittedRun(cluster, tmp_path, ONE_NODE)
    env = {**cluster.env, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(run.config), str(run.site)],
        env=env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith((run.job_id, "/"))]
    assert lines[0][0] == run.job_id
    assert lines[-1][0] == str(run.paths.root)
    job = cluster.wait_state(int(run.job_id), "COMPLETED")
    assert (job["TimeLimit"], job["Nice"]) == ("00:08:00", "3")
    assert run.step() == 2
    again = subprocess.run(
        [sys.executable, "-c", CALL, str(run.config), str(run.site)],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "is finished: nothing was queued" in again.stderr
