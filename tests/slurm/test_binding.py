"""A cluster that binds tasks to cores: a process of a run may use all CPUs that the job has on its node."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import ROOT, command, living, run_to_end
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, metrics_of

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be divided"),
]
CPUS = 2


@pytest.fixture(params=["cores", "autobind=cores"])
def binding(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(NODES=4, CPUS=CPUS, GPUS=1, BIND=request.param)
    try:
        yield made.up()
    finally:
        made.down()


def site_of(folder: Path, **more: object) -> Path:
    text = (ROOT / "configs" / "sites" / "testcluster.yaml").read_text()
    (folder / "bound.yaml").write_text(text + "".join(f"{key}: {value}\n" for key, value in more.items()))
    return folder / "bound.yaml"


def test_every_process_of_a_run_has_all_cpus_of_the_job(binding: Cluster, reference, tmp_path: Path) -> None:
    run = SubmittedRun(binding, tmp_path, reward=SLOW_REWARD, cpus_per_node=CPUS, exclusive=True)
    job_id = run.submit()
    run.wait_step(1)
    found = {
        pid: (module, os.sched_getaffinity(pid))
        for pid, module in living(run.paths.root).items()
        if module not in ("", "yatt.launch.attempt.job")
    }
    modules = {module for module, _ in found.values()}
    assert modules >= {"yatt.launch.node.step", "yatt.control", "yatt.trainer", "yatt.rollout", "yatt.reward"}
    assert {len(cpus) for _, cpus in found.values()} == {CPUS}, found
    started = run.events("worker.start")
    assert {event["cpus"] for event in started} == {"0-1"}, started
    run.hurry()
    run.wait_finished(job_id)
    assert metrics_of(run.paths) == reference["metrics"]


def test_diagnose_tries_the_step_that_a_run_would_have(binding: Cluster, tmp_path: Path) -> None:
    whole = site_of(tmp_path, cpus_per_node=CPUS, exclusive="true")
    assert "warn n1" not in (said := diagnose(binding, tmp_path, whole)), said
    few = site_of(tmp_path, cpus_per_node=CPUS, exclusive="true", srun_args="[--cpus-per-task=1]")
    said = diagnose(binding, tmp_path, few)
    assert f"warn n1: the task may use 1 CPUs, {CPUS} were requested." in said
    assert "srun_args: --cpu-bind=none" in said


def diagnose(cluster: Cluster, folder: Path, site: Path) -> str:
    argv = command("diagnose", "--site", str(site), "--nodes", "2")
    done = run_to_end(argv, env=cluster.env, cwd=folder, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
