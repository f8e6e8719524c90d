"""What a site file hands on to Slurm and to the nodes: options, variables, a script of the site's own."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.runs import living, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, metrics_of
from yatt.adapters.files.files import unsealed_any
from yatt.adapters.net.interface import IF_INET6

pytestmark = pytest.mark.slurm
TEMPLATE = """#!/bin/bash
# The customs of this site.
@DIRECTIVES@
#SBATCH --oversubscribe
echo "begun by the script of the site"
@COMMAND@
"""


@pytest.fixture
def reservation(cluster: Cluster):
    cluster.call(
        "scontrol", "create", "reservation=course", "starttime=now", "duration=60", "users=root",
        "nodes=ALL",
    )  # fmt: skip
    yield "course"
    cluster.call("scancel", "--user=root")
    delete = ["scontrol", "delete", "reservation=course"]  # refused while its last job is completing
    wait_for(
        lambda: subprocess.run(delete, env=cluster.env, capture_output=True, check=False).returncode == 0,
        timeout_s=60, what="the reservation to go",
    )  # fmt: skip


def test_options_variables_and_a_script_reach_slurm_and_the_nodes(
    cluster: Cluster, reservation: str, reference, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text(TEMPLATE)
    run = SubmittedRun(
        cluster, tmp_path, reward=SLOW_REWARD, template=str(tmp_path / "job.sh"),
        sbatch_args={"nice": 7, "exclude": "n5", "begin": "now"}, env={"NCCL_IB_HCA": "mlx5 0"},
        components={"engines": {"sbatch_args": {"exclude": "n4"}}},
    )  # fmt: skip
    done = run.yatt(
        "submit", str(run.config), "--site", str(run.site),
        "--set", f"sbatch_args.reservation={reservation}", "--set", "time_limit_min=7",
        SBATCH_PARTITION="high", SBATCH_RESERVATION="none",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        "SBATCH_PARTITION SBATCH_RESERVATION: set in this environment, but not passed on by yatt"
        in done.stderr
    )
    job_id = run.job_id
    trainer, engines = cluster.components(int(job_id))
    assert {part["Reservation"] for part in (trainer, engines)} == {reservation}
    assert {part["TimeLimit"] for part in (trainer, engines)} == {"00:07:00"}
    assert {part["Partition"] for part in (trainer, engines)} == {"low"}
    assert [part["ExcNodeList"] for part in (trainer, engines)] == ["n5", "n4"]
    assert trainer["Nice"] == "7"
    run.wait_step(1)
    assert "begun by the script of the site" in run.launcher_log()
    for pid, module in living(run.paths.root).items():
        if module in ("yatt.control", "yatt.trainer", "yatt.rollout", "yatt.reward"):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert b"NCCL_IB_HCA=mlx5 0" in variables, module
    os.kill(run.launcher, signal.SIGUSR2)  # the script's bash has become the launcher: the warning arrives
    run.wait_event("attempt.end", timeout_s=60)
    run.hurry()
    run.wait_finished(job_id)
    assert run.restarts(job_id) == 1
    assert metrics_of(run.paths) == reference["metrics"]


def test_a_site_without_environments_of_steps_and_without_its_local_disk_changes_nothing(
    cluster: Cluster, reference, tmp_path: Path
) -> None:
    """Profiles of such sites set these variables, at login and in jobs. The disk costs a line."""
    none = {"SLURM_EXPORT_ENV": "NONE", "SBATCH_EXPORT": "NONE"}
    setup = [f"export {name}={value}" for name, value in none.items()] + ["export STEPS_HAVE=it"]
    disk = {"folder": str(tmp_path / "nowhere")}
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD, setup=setup, stage=disk)
    said = run.yatt("diagnose", "--site", str(run.site), str(run.config), "--nodes", "2")
    assert "stage.folder" in said.stdout
    done = run.yatt("submit", str(run.config), "--site", str(run.site), **none)
    assert done.returncode == 0, done.stderr
    run.wait_step(1)
    assert b"SLURM_EXPORT_ENV=NONE" in Path(f"/proc/{run.launcher}/environ").read_bytes()
    for pid in living(run.paths.root):
        assert b"STEPS_HAVE=it" in Path(f"/proc/{pid}/environ").read_bytes()
    os.kill(run.launcher, signal.SIGUSR2)
    run.wait_attempts(2)
    run.hurry()
    run.wait_finished(run.job_id)
    assert run.restarts(run.job_id) == 1
    run.check(reference)
    log = next((run.paths.attempt(1) / "logs").glob("node0.*")).read_text()
    assert "cannot be used (No such file or directory); nothing is copied" in log


@pytest.mark.skipif(not socket.has_ipv6 or not IF_INET6.exists(), reason="no IPv6 on this machine")
def test_nodes_talk_over_ipv6_and_collectives_over_an_interface_of_their_own(
    cluster: Cluster, reference, tmp_path: Path
) -> None:
    other = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo,ib9"}
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD, interface="lo", ip_version=6, env=other)
    done = run.yatt("diagnose", "--site", str(run.site), "--nodes", "2")
    assert done.returncode == 0, done.stdout
    job_id = run.submit()
    run.wait_step(1)
    endpoints = unsealed_any(run.paths.all_endpoints(1).read_bytes())["addresses"]
    assert len(endpoints) == 4
    assert all(address.startswith("tcp://[::1]:") for address in endpoints.values()), endpoints
    [trainer, *_] = [pid for pid, name in living(run.paths.root).items() if name == "yatt.trainer"]
    assert b"NCCL_SOCKET_IFNAME=lo,ib9" in Path(f"/proc/{trainer}/environ").read_bytes()
    run.hurry()
    run.wait_finished(job_id)
    run.check(reference)


def test_a_setup_line_that_fails_ends_the_start_and_is_named(cluster: Cluster, tmp_path: Path) -> None:
    lines = ["export FOUND=1", "if false; then echo no; fi", "source /nowhere/activate", "touch begun"]
    run = SubmittedRun(cluster, tmp_path, setup=lines)
    job = cluster.wait_state(int(run.submit()), "FAILED", "COMPLETED")
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "1:0")
    assert "a setup line of the site file failed: source /nowhere/activate" in run.launcher_log()
    assert "ended before the run began; see its log" in run.yatt("status", str(run.paths.root)).stdout
    tried = run.yatt("diagnose", "--site", str(run.site), "--nodes", "1")
    assert tried.returncode == 2
    assert "no job ran on 1 nodes: FAILED" in tried.stdout
    assert "/nowhere/activate" in tried.stdout
