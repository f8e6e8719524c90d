"""Models, data and images on a node's own disk. The virtual nodes share one: one of them copies, all read.

A disk that is not there is in `test_site_options.py`.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import kill, living, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun
from tests.slurm.test_containers import stand_in
from tests.small_environments import make_environment, pack

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]


def test_engines_that_are_started_again_need_the_copies_only(
    cluster: Cluster, reference: dict[str, Any], tmp_path: Path
) -> None:
    """Copies of models, data and environment: the original environment is gone when they start."""
    disk = tmp_path / "disk"
    disk.mkdir()
    python = make_environment(tmp_path / "venv")
    archive = pack(tmp_path / "venv", tmp_path / "env.tar")
    stage = {"folder": "$NODE_DISK", "keep_h": 0, "environment": str(archive)}
    run = SubmittedRun(
        cluster, tmp_path, reward=SLOW_REWARD, stage=stage, env={"NODE_DISK": str(disk)}, python=str(python)
    )
    job_id = run.submit()
    run.wait_step(2)
    copies = [path.name for path in disk.glob("*/*/*")]
    assert sorted(copies) == ["policy", "train.jsonl", "unpacked"]
    pythons = {
        pid: interpreter(pid) for pid, module in living(run.paths.root).items() if "launch" not in module
    }
    assert len(pythons) > 8 and all(python.startswith(str(disk)) for python in pythons.values())
    (tmp_path / "policy").rename(tmp_path / "moved")
    (tmp_path / "venv").rename(tmp_path / "venv-moved")
    (tmp_path / "train.jsonl").unlink()
    engines = [pid for pid, module in living(run.paths.root).items() if module == "yatt.rollout"]
    assert len(engines) > 1
    assert all(kill(pid) for pid in engines)
    run.wait_step(5)
    (tmp_path / "moved").rename(tmp_path / "policy")
    (tmp_path / "venv-moved").rename(tmp_path / "venv")
    run.file.write()
    cluster.call("scontrol", "requeue", job_id)
    run.wait_attempts(2)
    run.hurry()
    run.wait_finished(job_id)
    run.check(reference)
    wait_for(lambda: not list(disk.glob("*/*")), what="the copies to be removed")


def interpreter(pid: int) -> str:
    """Returns the command that started a process, as it was written: /proc/PID/exe resolves links."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def test_a_containers_image_is_copied_before_the_steps_in_it(
    cluster: Cluster, reference: dict[str, Any], tmp_path: Path
) -> None:
    image, disk = tmp_path / "yatt.sif", tmp_path / "disk"
    image.write_bytes(b"image")
    disk.mkdir()
    container = {**stand_in(tmp_path), "image": str(image)}
    run = SubmittedRun(
        cluster, tmp_path, container=container, python=sys.executable, stage={"folder": str(disk)}
    )
    job_id = run.submit()
    run.wait_finished(job_id)
    run.check(reference)
    (srun,) = (run.paths.attempt(1) / "logs").glob("*srun-trainer*")
    (copy,) = disk.glob("*/*/yatt.sif")
    assert f"entered {copy}\n" in srun.read_text()
    shutil.rmtree(disk)
