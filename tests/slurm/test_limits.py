"""Notice that is short, missing or comes from the clock; and runs that only crash."""

import os
import pickle
import re
import signal
from collections.abc import Iterator

import pytest

from tests.runs import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, ends
from yatt.adapters.run_folder.ledger import started_attempts

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]

HIGH = "#!/bin/bash\nsleep 6\n"
SAVE_EVERY = 3


@pytest.fixture(scope="module")
def silent() -> Iterator[Cluster]:
    """A cluster that sends no signal of the user's to jobs it preempts."""
    made = Cluster(SIGNAL=0, GRACE=0, NODES=5, KILLWAIT=5, SLURMD_TIMEOUT=20)
    try:
        yield made.up()
    finally:
        made.down()


@pytest.mark.parametrize("grace_s", [0, 10])
def test_preempted_without_the_signal_it_asked_for(silent: Cluster, reference, tmp_path, grace_s):
    """Without grace all is killed within seconds; with it the tasks are told, the batch script is not."""
    silent.reset()
    silent.call("scontrol", "update", "PartitionName=low", f"GraceTime={grace_s}")
    settings = {"checkpoint": {"save_every": SAVE_EVERY, "keep": 4}}
    run = SubmittedRun(silent, tmp_path, settings, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(5)
    silent.sbatch(HIGH, "--partition=high", "--nodes=3", "--exclusive")
    run.wait_attempts(2)
    run.hurry()
    run.wait_finished(job_id)
    first, second = started_attempts(run.paths)
    assert second.started["committed"] >= (SAVE_EVERY if grace_s == 0 else 5), "an interval at most"
    if grace_s:
        assert ends(run.paths)[0] == (75, "preempted")
        assert second.started["committed"] == first.ended["committed"], "nothing is lost"
    assert (second.started["job"], second.started["restarts"], run.restarts(job_id)) == (job_id, 1, 1)
    run.check(reference)


def test_the_time_limit_is_near(cluster: Cluster, reference, tmp_path):
    """Slurm looks at limits every half minute and warns up to a minute early; then it is as a preemption."""
    slower = SLOW_REWARD.replace("sleep(0.2)", "sleep(1.0)")  # by itself it would take more than a minute
    assert slower != SLOW_REWARD
    run = SubmittedRun(cluster, tmp_path, reward=slower, signal_lead_s=45)
    job_id = run.submit()
    run.wait_step(1)
    cluster.call("scontrol", "update", f"jobid={job_id}", "TimeLimit=1")
    wait_for(lambda: run.restarts(job_id) == 1, timeout_s=150, what="the requeue")
    cluster.call("scontrol", "update", f"jobid={job_id}", "TimeLimit=10")
    run.hurry()
    run.wait_finished(job_id)
    first, second = started_attempts(run.paths)
    assert ends(run.paths)[0] == (75, "the time limit is near")
    assert second.started["committed"] == first.ended["committed"] >= 1
    assert (second.started["job"], run.restarts(job_id)) == (job_id, 1)
    run.check(reference)


def test_a_site_without_requeue_chains_a_successor(cluster: Cluster, reference, tmp_path):
    run = SubmittedRun(cluster, tmp_path, requeue="chain")
    first_id = run.submit()
    run.wait_step(2)
    os.kill(run.launcher, signal.SIGUSR2)
    run.wait_attempts(2)
    next_id = started_attempts(run.paths)[1].started["job"]
    assert next_id != first_id
    assert next_id in run.yatt("status", str(run.paths.root)).stdout
    run.wait_finished(next_id)
    over = cluster.wait_state(int(first_id), "FAILED", "COMPLETED")
    assert (over["JobState"], over["Restarts"], over["ExitCode"]) == ("FAILED", "0", "75:0")
    assert run.restarts(next_id) == 0
    assert [row["id"] for row in cluster.squeue()] == [], "one successor"
    assert len(started_attempts(run.paths)) == 2
    assert (
        started_attempts(run.paths)[1].started["committed"]
        == started_attempts(run.paths)[0].ended["committed"]
    )
    run.check(reference)


CRASHING = """
import os
import signal
import threading
from pathlib import Path

COMMITTED = Path(__file__).parent / "run" / "checkpoints" / "manifests"


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] == 9:
        while not any(COMMITTED.glob("*.json")):
            threading.Event().wait(0.05)  # a save of an iteration before goes on in the background
        os.kill(os.getppid(), signal.SIGKILL)
    return 0.0
"""


def test_a_crash_loop_without_progress_ends_with_its_cause(cluster: Cluster, tmp_path):
    run = SubmittedRun(cluster, tmp_path, {"run": {"max_attempts_without_progress": 2}}, reward=CRASHING)
    job_id = run.submit()
    over = cluster.wait_state(int(job_id), "FAILED", "COMPLETED", timeout_s=120)
    assert (over["JobState"], over["ExitCode"], over["Restarts"]) == ("FAILED", "93:0", "0")
    found = ends(run.paths)
    assert [code for code, _ in found] == [1, 1]
    assert all("was killed by SIGKILL" in reason for _, reason in found)
    said = run.launcher_log()
    assert re.search(
        r"2 attempts in a row failed without a checkpoint after iteration \d; reason of the last one: node\d",
        said,
    )
    assert submitit_result(run, job_id) == (
        "error", f"the run in {run.paths.root} ended with exit code 93; see its log"
    )  # fmt: skip
    run.check_checkpoints()
    run.check_nothing_left(())


MISTAKEN = """
import os

if "SLURM_STEP_ID" in os.environ:
    raise KeyError("a table that only the login node has")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
"""


def test_a_mistake_of_the_users_is_not_tried_again(cluster: Cluster, tmp_path):
    run = SubmittedRun(cluster, tmp_path, reward=MISTAKEN)
    job_id = run.submit()
    over = cluster.wait_state(int(job_id), "FAILED", "COMPLETED", timeout_s=90)
    assert (over["JobState"], over["ExitCode"], over["Restarts"]) == ("FAILED", "2:0", "0")
    assert [code for code, _ in ends(run.paths)] == [2]
    assert "a table that only the login node has" in run.launcher_log()
    assert submitit_result(run, job_id)[0] == "error"
    run.check_nothing_left(())


def submitit_result(run: SubmittedRun, job_id: str) -> tuple[str, str]:
    path = run.paths.submitit / f"{job_id}_0_result.pkl"
    found: tuple[str, str] = pickle.loads(path.read_bytes())  # noqa: S301 - submitit's own
    return found
