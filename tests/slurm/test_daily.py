"""A submitted run from day to day: looking at it, stopping it, going on, on other nodes as well."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import FailedJobError

from tests.runs import HANG_S, RunFile, command, kill, popen, start, wait_for, yatt
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ITERATIONS, SLOW_REWARD, SubmittedRun, ends, metrics_of
from yatt.adapters.run_folder.ledger import started_attempts
from yatt.launch.commands.executor import HetJob
from yatt.launch.commands.stacks import of_node

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
BLOCKER = "#!/bin/bash\nsleep 300\n"


def status(run: SubmittedRun) -> dict[str, Any]:
    done = run.yatt("status", str(run.paths.root), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def waiting_run(cluster: Cluster, run: SubmittedRun) -> tuple[str, int]:
    """Submitted while another job has every node; both jobs' ids."""
    blocker = cluster.sbatch(BLOCKER, "--nodes=5", "--exclusive")
    cluster.wait_state(blocker, "RUNNING")
    return run.submit(), blocker


def test_a_run_can_be_looked_at_before_during_and_after(cluster: Cluster, tmp_path, monkeypatch) -> None:
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    root = str(run.paths.root)
    job_id, blocker = waiting_run(cluster, run)
    run._wait(lambda: "waits until enough nodes are free" in status(run)["why"], 20, "the reason")
    before = run.yatt("status", root).stdout
    assert f"{root}: waiting\n" in before
    assert f"job         {job_id}: PENDING\n  component 0 PENDING in low: 2 nodes wanted" in before
    none_yet = run.yatt("logs", root)
    assert (none_yet.returncode, "the run was not started" in none_yet.stderr) == (2, True)

    watch = followed(run, "watch", root)
    logs = followed(run, "logs", root, "-f", "--role", "node0")
    assert watch.stdout is not None
    assert watch.stdout.readline() == "waiting: Resources: waits until enough nodes are free\n"
    cluster.call("scancel", str(blocker))
    run.wait_step(2)
    with run.held():
        during = status(run)
        assert (during["state"], during["attempt"], during["job"]["state"]) == ("running", 1, "RUNNING")
        assert set(during["holders"].values()) == {"trainer", "rollout"}
        assert f"attempt 1 of job {job_id}, restart 0" in run.yatt("logs", root, "--role", "job").stdout
        listed = run.yatt("list").stdout.splitlines()
        assert listed[1].split()[:2] == [job_id, "RUNNING"]
        assert run.yatt("list", str(tmp_path)).stdout.splitlines()[1].split()[0] == job_id

        check_stacks(run, job_id, monkeypatch)
    run.hurry()
    run.wait_finished(job_id)
    after = run.yatt("status", root).stdout
    assert f"{root}: finished, attempt 1\n" in after
    assert "pid" not in after, "no worker is left to tell of"
    assert run.yatt("list").stdout.splitlines()[1].split()[1:4] == [
        "COMPLETED",
        f"{ITERATIONS}/{ITERATIONS}",
        "finished",
    ]
    assert watch.wait(timeout=HANG_S) == 0
    logs.terminate()
    seen, log = watch.communicate()[0], logs.communicate()[0]
    assert f"iteration {ITERATIONS}/{ITERATIONS}" in seen
    assert seen.endswith("finished\n")
    assert "iteration 1: rollout" in log
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    job = HetJob(run.paths.submitit, job_id)
    assert job.done()
    assert job.result() == root


def check_stacks(run: SubmittedRun, job_id: str, monkeypatch) -> None:
    """Stacks of this machine, and of a node by srun; here both are the same processes."""
    found = json.loads(run.yatt("stack", str(run.paths.root), "--json").stdout)
    names = [each["name"] for each in found["processes"] if each["text"]]
    assert found["not_asked"] == {} and len(names) == len(set(names))
    assert {"launcher", "node0", "node1", "step0", "step1"} <= set(names)
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", run.cluster.env["SLURM_CONF"])
        of_first = of_node(run.paths, job_id, 0)
    assert not isinstance(of_first, str), of_first
    assert "node0" in [dump.name for dump in of_first]


def followed(run: SubmittedRun, *arguments: str) -> "subprocess.Popen[str]":
    """A command that goes on until it is ended; its output is read then."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return popen(command(*arguments), env=run.cluster.env, **how)


def test_cancel_saves_and_resume_goes_on_to_the_same_end(cluster: Cluster, reference, tmp_path) -> None:
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    root = str(run.paths.root)
    first = run.submit()
    run.wait_step(2)
    done = run.yatt("cancel", root)
    assert done.returncode == 0, done.stderr
    (ended,) = (attempt.ended for attempt in started_attempts(run.paths))
    assert (ended["exit_code"], ended["reason"]) == (75, "cancelled by its user")
    assert ended["committed"] >= run.step() >= 2, "what was trained is saved"
    assert f"stopped after iteration {ended['committed']}, which is saved" in done.stdout
    cluster.wait_state(int(first), "CANCELLED")
    assert run.restarts(first) == 0
    assert status(run)["state"] == "stopped"
    run.check_nothing_left(())
    again = run.yatt("cancel", root)
    assert (again.returncode, f"job {first} is over (CANCELLED)" in again.stderr) == (2, True)

    second = resumed(run)
    run.wait_step(ended["committed"] + 2)
    with run.held():
        assert run.yatt("cancel", root, "--now").returncode == 0
        cluster.wait_state(int(second), "CANCELLED")
    assert status(run)["state"] == f"cut off: job {second} is CANCELLED"
    wrong = run.yatt("resume", root, "--set", "partitio=high")
    assert (wrong.returncode, "Did you mean 'partition'" in wrong.stderr) == (2, True)
    run.hurry()
    third = resumed(run, "--set", "time_limit_min=9", "--set", "partition=high")
    job = cluster.show_job(int(third))
    assert (job["TimeLimit"], job["Partition"]) == ("00:09:00", "high")
    run.wait_finished(third)
    assert [code for code, _ in ends(run.paths)] == [75, None, 0]
    assert len({first, second, third}) == 3
    over = run.yatt("resume", root, "--set", "partition=high")
    assert "is finished: nothing to do" in over.stdout
    assert run.yatt("report", root).returncode == 0
    page = (run.paths.root / "report.html").read_text()
    assert all(f"{job}: first start." in page for job in (first, second, third))
    assert page.count("stopped, to be continued (exit code 75)") >= 1
    run.check(reference)


def resumed(run: SubmittedRun, *arguments: str) -> str:
    done = run.yatt("resume", str(run.paths.root), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[2]


def test_a_waiting_run_is_cancelled_before_it_began(cluster: Cluster, tmp_path: Path) -> None:
    run = SubmittedRun(cluster, tmp_path)
    job_id, _ = waiting_run(cluster, run)
    assert f"job {job_id} cancelled" in run.yatt("cancel", str(run.paths.root)).stdout
    assert cluster.show_job(int(job_id))["JobState"] == "CANCELLED"
    assert status(run)["state"] == "never began"


def test_a_run_goes_on_with_another_number_of_nodes(cluster: Cluster, reference, tmp_path) -> None:
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    root = str(run.paths.root)
    run.submit()
    run.wait_step(3)
    assert run.yatt("cancel", root).returncode == 0
    run.hurry()
    committed = started_attempts(run.paths)[0].ended["committed"]
    too_many = run.yatt("resume", root, "--nodes", "3", "--trainer-nodes", "3")
    assert too_many.returncode == 2
    assert "the run cannot continue on 3 nodes:\n  placement.trainer_nodes: 3 of 3 nodes" in too_many.stderr
    job_id = resumed(run, "--nodes", "3", "--trainer-nodes", "1")
    run.wait_finished(job_id)
    components = [attempt.started["hosts"] for attempt in started_attempts(run.paths)]
    sizes = [{name: len(found) for name, found in hosts.items()} for hosts in components]
    assert sizes == [{"trainer": 2, "engines": 2}, {"trainer": 3}], "one trainer node shares a flat job"
    mine, others = metrics_of(run.paths), reference["metrics"]
    assert mine[:committed] == others[:committed]
    assert len(mine) == ITERATIONS
    rewards = [[row["critic/rewards/mean"] for row in rows[committed:]] for rows in (mine, others)]
    assert rewards[0][0] == rewards[1][0], "the same prompts and completions as with two trainers"
    accepted = {event["number"] for event in run.events("rollout.group.accept")}
    assert accepted == set(range(4 * ITERATIONS)), "no prompt is passed over"
    assert sum(abs(a - b) for a, b in zip(*rewards, strict=True)) / len(rewards[0]) < 0.1
    run.check_checkpoints()
    run.check_nothing_left(())


def test_sizes_that_do_not_divide_are_refused_on_resume(cluster: Cluster, tmp_path: Path) -> None:
    run = SubmittedRun(cluster, tmp_path, {"trainer": {"tensor_model_parallel_size": 2}})
    assert run.yatt("submit", "--prepare", str(run.config), "--site", str(run.site)).returncode == 0
    done = run.yatt("resume", str(run.paths.root), "--nodes", "3", "--trainer-nodes", "1")
    assert done.returncode == 2
    assert "tensor x pipeline x context parallel = 2 does not divide the 1 GPUs" in done.stderr
    assert cluster.squeue() == []


def test_a_run_that_gives_up_ends_its_job_with_93(cluster: Cluster, tmp_path, monkeypatch) -> None:
    settings = {"run": {"max_attempts_without_progress": 1}, "checkpoint": {"save_every": 100}}
    run = SubmittedRun(cluster, tmp_path, settings, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(2)
    assert kill(run.pid("trainer-n0"))
    assert cluster.wait_state(int(job_id), "FAILED", timeout_s=60)["ExitCode"] == "93:0"
    told = status(run)
    assert told["state"] == "failed"
    assert "trainer-n0r0 ended: killed by SIGKILL" in told["why"]
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    job = HetJob(run.paths.submitit, job_id)
    assert job.done()
    with pytest.raises(FailedJobError, match="exit code 93"):
        job.result()


def test_a_run_of_this_machine_is_cancelled_as_well(tmp_path: Path) -> None:
    file = RunFile(tmp_path, {"trainer": {"total_iterations": 100_000}})
    run = start("run", str(file.write()))
    try:
        wait_for(lambda: (file.run_dir / "metrics.jsonl").exists(), timeout_s=90, what="an iteration")
        done = yatt("cancel", str(file.run_dir))
        assert done.returncode == 0, done.stderr
        assert run.wait(timeout=HANG_S) == 75
    finally:
        run.kill()
        run.communicate()
    assert "stopped after iteration" in done.stdout
    shown = yatt("status", str(file.run_dir))
    assert ": stopped, attempt 1\n  why         cancelled by its user" in shown.stdout
