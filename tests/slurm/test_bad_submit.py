"""What cannot be run is refused before anything is queued, by one message that names the place and the cure,
and leaves nothing behind."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import rows, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, ends
from yatt.adapters.run_folder.ledger import ENDED, record_of_attempt
from yatt.errors import EXIT_WILL_CONTINUE

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def odd_cluster() -> Iterator[Cluster]:
    """Three nodes, a scheduler that does not start heterogeneous jobs, and a partition with a short limit."""
    made = Cluster(NODES=3, SCHEDULER="builtin")
    try:
        made.up()
        made.call("scontrol", "update", "PartitionName=low", "MaxTime=00:05:00")
        yield made
    finally:
        made.down()


FAULTS = {
    "partition": (
        {}, {"partition": "gpu"},
        "partition: there is no partition 'gpu'. Write partition: one of low, high.",
    ),
    "gpus": (
        {"launch": {"device": "cuda", "gpus_per_node": 5}, "rollout": {"engine": "scripted"}}, {},
        "trainer: 2 nodes with 5 GPUs are needed; 0 of 5 have that. The largest have 4 GPUs",
    ),
    "nodes": (
        {"launch": {"nodes": 6}}, {},
        "engines: 6 nodes are needed in partition low, which has 5. Use fewer nodes, or another partition.",
    ),
    "feature": ({}, {"constraint": "h100"}, "feature h100 are needed; 0 of 5 have that."),
    "key": ({}, {"partitoin": "low"}, "partitoin"),
    "nodelist": (
        {}, {"components": {"trainer": {"nodelist": "n[1,77]"}}},
        "trainer: nodelist n[1,77]: partition low has no n77. Its nodes are n[1-5].",
    ),
    "sbatch": ({}, {"constraint": "h100&ib"}, "sbatch refused the job, nothing was queued: "),
}  # fmt: skip


DIAGNOSED = {"gpus": 2, "sbatch": 0}
"""Exit code of `yatt diagnose`, which makes the same checks, but does not try sbatch."""


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_cluster_has_not_is_refused(cluster: Cluster, tmp_path: Path, fault: str) -> None:
    settings, site, says = FAULTS[fault]
    run = SubmittedRun(cluster, tmp_path, settings, **site)
    assert says in run.refused()
    if fault in DIAGNOSED:
        diagnosed = run.yatt("diagnose", str(run.config), "--site", str(run.site))
        assert diagnosed.returncode == DIAGNOSED[fault], diagnosed.stdout + diagnosed.stderr


def test_without_accounting_slurm_takes_any_account_and_diagnose_says_so(cluster, tmp_path) -> None:
    run = SubmittedRun(cluster, tmp_path, account="nobody")
    shown = run.yatt("submit", str(run.config), "--site", str(run.site), "--dry-run")
    assert "#SBATCH --account=nobody" in shown.stdout
    assert not run.paths.root.exists()
    diagnosed = run.yatt("diagnose", str(run.config), "--site", str(run.site))
    assert "account: no accounting" in diagnosed.stdout
    cluster.call("sbatch", "--test-only", "--account=nobody", "--wrap=true")


def test_a_longer_time_than_the_partition_gives_is_refused(odd_cluster: Cluster, tmp_path: Path) -> None:
    run = SubmittedRun(odd_cluster, tmp_path, {"launch": {"nodes": 3}})
    assert "time_limit_min is 10, more than low allows (00:05:00). Write time_limit_min: 5." in run.refused()


def test_two_components_are_refused_where_only_plain_jobs_start(odd_cluster: Cluster, tmp_path: Path) -> None:
    small = {"launch": {"nodes": 3}}
    forced = SubmittedRun(odd_cluster, tmp_path, small, layout="het", time_limit_min=5)
    assert (
        "sched/builtin does not start heterogeneous jobs; sched/backfill does. Write layout: flat."
        in forced.refused()
    )
    left = SubmittedRun(odd_cluster, tmp_path, small, time_limit_min=5)
    shown = left.yatt("submit", str(left.config), "--site", str(left.site), "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "#SBATCH hetjob" not in shown.stdout


COMMANDS = ("sbatch", "scontrol", "squeue", "scancel", "srun")


@pytest.mark.parametrize("missing", [("scontrol",), ("sbatch",), COMMANDS])
def test_missing_commands_are_named(cluster: Cluster, tmp_path: Path, missing: tuple[str, ...]) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in set(COMMANDS) - set(missing):
        (folder / name).symlink_to(shutil.which(name))
    run = SubmittedRun(cluster, tmp_path)
    says = run.refused(PATH=str(folder))
    assert f"commands: not on the PATH: {', '.join(missing)}." in says
    assert "controller" not in says


def test_a_folder_that_cannot_be_written_to_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = SubmittedRun(cluster, tmp_path, {"run": {"dir": str(tmp_path / "file" / "run")}})
    says = run.refused()
    assert f"run.dir: {tmp_path / 'file' / 'run'}: cannot be used as a folder of the run" in says
    assert f"{tmp_path / 'file'} is no folder that you may write to. Write another one." in says


def test_a_controller_that_is_down_is_said_at_once(cluster: Cluster, tmp_path: Path) -> None:
    run = SubmittedRun(cluster, tmp_path)
    cluster.ctld("stop")
    done = run.yatt("submit", str(run.config), "--site", str(run.site), timeout_s=60)
    assert done.returncode == 2
    assert "slurm: the controller does not answer." in done.stderr
    assert not run.paths.root.exists()
    cluster.ctld("start")
    assert cluster.squeue() == []


def test_a_second_submit_is_refused_while_the_job_lives(cluster: Cluster, tmp_path: Path) -> None:
    blocker = cluster.sbatch("#!/bin/bash\nsleep 100\n", "--nodes=5", "--exclusive")
    cluster.wait_state(blocker, "RUNNING")
    run = SubmittedRun(cluster, tmp_path)
    job_id = run.submit()
    files = sorted(run.paths.root.rglob("*"))
    again = run.yatt("submit", str(run.config), "--site", str(run.site))
    assert again.returncode == 2
    assert f"job {job_id} of this run is PENDING already; see `yatt status {run.paths.root}`" in again.stderr
    assert len(cluster.squeue()) == 3, "the blocker, and two components"
    assert sorted(run.paths.root.rglob("*")) == files
    other = run.yatt("submit", str(run.config), "--site", str(run.site), "rollout.n=8")
    assert other.returncode == 2
    assert "rollout.n: was 4, is 8" in other.stderr
    cancelled = run.yatt("cancel", str(run.paths.root))
    assert cancelled.returncode == 0, cancelled.stderr
    refused = run.yatt("resume", str(run.paths.root), "--nodes", "2", "--trainer-nodes", "2")
    assert refused.returncode == 2
    assert "placement.trainer_nodes: 2 of 2 nodes" in refused.stderr


@pytest.fixture
def blind_node(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A folder that n4 does not see: its slurmd has a mount namespace of its own."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    start = f"mount -t tmpfs none {hidden} && slurmd -N n4 -f {cluster.root}/etc/slurm.conf"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a mount namespace")
    cluster.lost("n4")
    cluster.call("unshare", "-m", "bash", "-c", start)
    yield hidden
    cluster.lost("n4")
    cluster.start("n4")


def test_a_node_that_does_not_see_the_run_folder_is_named(cluster, tmp_path, blind_node) -> None:
    settings = {"run": {"dir": str(blind_node / "run")}}
    run = SubmittedRun(cluster, tmp_path, settings, components={"engines": {"nodelist": "n4"}})
    job_id = run.submit()
    assert cluster.wait_state(int(job_id), "FAILED")["ExitCode"] == "2:0"
    says = f"n4 does not see the run folder {run.paths.root}; use a folder that all nodes share."
    assert ends(run.paths) == [(2, says)]
    assert says in run.launcher_log()
    assert says in run.yatt("status", str(run.paths.root)).stdout


def test_a_batch_node_that_does_not_see_the_run_folder_is_named(cluster, tmp_path, blind_node) -> None:
    settings = {"run": {"dir": str(blind_node / "run")}}
    run = SubmittedRun(cluster, tmp_path, settings, components={"trainer": {"nodelist": "n4"}})
    job_id = run.submit()
    cluster.wait_state(int(job_id), "FAILED")
    says = run.yatt("status", str(run.paths.root)).stdout
    assert f"probably n4 does not see {run.paths.root}" in says


def test_a_submit_with_take_over_lets_the_running_job_save_first(cluster: Cluster, tmp_path: Path) -> None:
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    first = run.submit()
    wait_for(lambda: len(rows(run.paths.metrics)) >= 1, timeout_s=90, what="an iteration")
    done = run.yatt("submit", str(run.config), "--site", str(run.site), "--take-over")
    assert done.returncode == 0, done.stderr
    assert f"job {first} of this run is RUNNING: taking over" in done.stdout
    saved = record_of_attempt(run.paths, 1, ENDED)
    assert (saved["exit_code"], saved["committed"] >= 1) == (EXIT_WILL_CONTINUE, True)
    second = run.job_id
    assert second != first
    wait_for(lambda: run.paths.attempt(2).exists(), timeout_s=90, what="the second job's attempt")
    cluster.call("scancel", second)
    cluster.wait_state(int(second), "CANCELLED")
