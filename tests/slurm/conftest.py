"""One real cluster for all tests of this folder, put right again after each."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster


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
