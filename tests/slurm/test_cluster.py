"""The test cluster itself: real jobs, components, preemption, dead nodes."""

import pytest

from tests.runs import wait_for
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm

HET = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=2
for group in 0 1; do
  srun --overlap --het-group=$group --nodes=2 --ntasks=2 --ntasks-per-node=1 \\
    bash -c 'echo "group '$group' $SLURMD_NODENAME $SLURM_PROCID gpus $CUDA_VISIBLE_DEVICES"' &
done
wait
"""
# No srun: it would end at the first SIGTERM, and a job that ends by itself in its grace is not requeued.
SLEEP = "#!/bin/bash\necho start ${SLURM_RESTART_COUNT:-0}\nsleep 300\n"


def test_a_job_runs_on_two_nodes_with_the_gpus_it_asked_for(cluster: Cluster) -> None:
    job = cluster.sbatch(
        "#!/bin/bash\nsrun bash -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'\n",
        "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2",
    )  # fmt: skip
    cluster.wait_state(job, "COMPLETED")
    assert sorted(cluster.log(job).split()) == ["0,1", "0,1", "n1", "n2"]


def test_a_job_of_two_components_runs_steps_in_each(cluster: Cluster) -> None:
    job = cluster.sbatch(HET)
    cluster.wait_state(job, "COMPLETED")
    assert [row["HetJobOffset"] for row in cluster.components(job)] == ["0", "1"]
    lines = sorted(cluster.log(job).splitlines())
    assert [line.split()[1] for line in lines] == ["0", "0", "1", "1"]
    assert len({line.split()[2] for line in lines}) == 4
    assert [line.split()[-1] for line in lines] == ["0,1,2,3", "0,1,2,3", "0,1", "0,1"]


def test_a_job_in_high_takes_the_nodes_of_one_in_low_and_that_one_comes_back(cluster: Cluster) -> None:
    low = cluster.sbatch(SLEEP, "--nodes=4", "--partition=low", "--exclusive")
    cluster.wait_state(low, "RUNNING")
    high = cluster.sbatch("#!/bin/bash\ntrue\n", "--nodes=5", "--partition=high", "--exclusive")
    cluster.wait_state(high, "COMPLETED")
    row = cluster.wait_state(low, "RUNNING")
    assert row["Restarts"] == "1"
    wait_for(lambda: "start 1" in cluster.log(low), what="the second start")


def test_a_crashed_node_goes_down_and_reset_brings_it_back(cluster: Cluster) -> None:
    job = cluster.sbatch(SLEEP, "--nodes=1", "--nodelist=n3")
    cluster.wait_state(job, "RUNNING")
    cluster.crash("n3")
    cluster.wait_node("n3", "DOWN")
    cluster.reset()
    assert cluster.squeue() == []
    assert {cluster.node_state(node) for node in cluster.nodes} == {"IDLE"}


def test_jobs_run_on_while_the_controller_is_down(cluster: Cluster) -> None:
    job = cluster.sbatch("#!/bin/bash\nuntil [ -e go ]; do sleep 0.1; done\n", f"--chdir={cluster.root}")
    cluster.wait_state(job, "RUNNING")
    cluster.ctld("stop")
    (cluster.root / "go").touch()
    cluster.ctld("start")
    cluster.wait_state(job, "COMPLETED")


def test_reset_ends_what_a_dead_slurmd_left_running(cluster: Cluster) -> None:
    job = cluster.sbatch(SLEEP, "--nodes=1", "--nodelist=n2")
    wait_for(lambda: "start 0" in cluster.log(job), what="the job")
    cluster.lost("n2")
    cluster.pause("n4")
    cluster.reset()
    assert cluster.squeue() == []
