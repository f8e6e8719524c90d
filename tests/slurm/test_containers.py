"""Sites whose steps run in containers: submitted without engines, and without scontrol on the nodes."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.runs import ROOT, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, metrics_of
from yatt.adapters.run_folder.ledger import started_attempts

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1500)]
HEAVY = ("torch", "vllm", "megatron", "transformers", "triton", "nvidia")

RUNTIME = """#!/bin/bash
# A stand-in for a container runtime: as its like it changes what is on the PATH, and nothing else.
set -eu
shift  # exec
while [[ $1 == --* ]]; do
  [[ $1 != --bind ]] || shift
  shift
done
echo "entered $1" >&2
shift
PATH=@BIN@ exec "$@"
"""


@pytest.fixture
def container(tmp_path: Path) -> dict[str, object]:
    """A runtime in which there is no scontrol."""
    return stand_in(tmp_path)


def stand_in(tmp_path: Path) -> dict[str, object]:
    """What a site file says of it; it lies in this folder."""
    (tmp_path / "bin").mkdir()
    for name in ("sh", "bash", "uname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    runtime = tmp_path / "runtime"
    runtime.write_text(RUNTIME.replace("@BIN@", str(tmp_path / "bin")))
    runtime.chmod(0o755)
    return {
        "runtime": "apptainer", "image": "/images/yatt.sif", "mounts": [f"{tmp_path}:{tmp_path}"],
        "command": [str(runtime), "exec"], "args": ["--cleanenv"], "python": sys.executable,
    }  # fmt: skip


@pytest.fixture
def login_node(tmp_path: Path) -> Path:
    """All libraries of this environment but those of engines and trainer."""
    folder = tmp_path / "light"
    folder.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(HEAVY):
            (folder / entry.name).symlink_to(entry)
    return folder


def test_a_run_is_submitted_without_engines_and_outlives_its_batch_node(
    cluster: Cluster, reference, container, login_node: Path, tmp_path: Path
) -> None:
    """Slurm requeues the job, since no node could ask for it."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD, container=container, python=sys.executable)
    path = f"{ROOT}{os.pathsep}{login_node}"
    env = {**cluster.env, "PYTHONPATH": path, "XDG_STATE_HOME": str(tmp_path / "state")}
    argv = [sys.executable, "-S", "-m", "yatt.cli.main", "submit", str(run.config), "--site", str(run.site)]
    without = subprocess.run(
        [sys.executable, "-S", "-c", "import torch"], env=env, capture_output=True, text=True, check=False
    )
    assert "No module named 'torch'" in without.stderr
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    run.wait_step(2)
    (srun,) = (run.paths.attempt(1) / "logs").glob("*srun-trainer*")
    assert "entered /images/yatt.sif" in srun.read_text()
    controller = run.controller(0)
    variables = Path(f"/proc/{controller}/environ").read_bytes().split(b"\0")
    assert f"PATH={tmp_path}/bin".encode() in variables, "there is no scontrol in it"
    cluster.crash(cluster.show_job(int(run.job_id))["BatchHost"])
    wait_for(lambda: run.restarts(run.job_id) == 1, timeout_s=120, what="Slurm to requeue the job")
    run.hurry()
    run.wait_finished(run.job_id)
    assert len(started_attempts(run.paths)) == 2
    assert metrics_of(run.paths) == reference["metrics"]
    assert cluster.squeue() == []
