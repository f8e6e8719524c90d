"""One real cluster for all tests of this folder, put right again after each."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SubmittedRun, metrics_of, weights_of


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    made = Cluster(NODES=5, GRACE=10, KILLWAIT=5, SLURMD_TIMEOUT=20)
    try:
        yield made.up()
    finally:
        made.down()


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """Five idle nodes n1..n5 with 4 GPUs each; partitions `low` and `high`, which preempts low."""
    yield running_cluster
    running_cluster.reset()


@pytest.fixture(scope="session")
def reference(running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run of `tests.slurm.jobs` comes to when nothing happens to it."""
    return undisturbed(SubmittedRun(running_cluster, tmp_path_factory.mktemp("reference")))


@pytest.fixture(scope="session")
def real_reference(running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same with the real trainer."""
    real = {"model": {"trainer": "megatron"}}
    return undisturbed(SubmittedRun(running_cluster, tmp_path_factory.mktemp("real"), real))


def undisturbed(run: SubmittedRun) -> dict[str, Any]:
    job_id = run.submit()
    run.wait_finished(job_id)
    assert run.restarts(job_id) == 0
    return {"metrics": metrics_of(run.paths), "weights": weights_of(run.paths)}
