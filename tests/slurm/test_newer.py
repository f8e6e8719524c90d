"""The launcher's tests once more, on the Slurm of the next Debian (24.11), where that could be had."""

import json
from collections.abc import Iterator

import pytest

from tests.runs import ROOT, command, run_to_end, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SubmittedRun, ends
from tests.slurm.test_daily import (
    test_cancel_saves_and_resume_goes_on_to_the_same_end as test_cancel_saves_and_resume_goes_on,
)
from tests.slurm.test_launcher_killed import (
    test_a_killed_launcher_is_followed_by_the_next_start as test_a_killed_launcher_is_followed,
)
from tests.slurm.test_lost_machines import (
    test_a_lost_batch_node_leaves_no_zombie as test_a_lost_batch_node_leaves_no_zombie,
    test_a_lost_engine_node_shrinks_the_pool_and_a_restart_in_the_same_start_does_without_it as test_a_lost_engine_node_shrinks,  # noqa: E501
)
from tests.slurm.test_one_job import (
    test_a_job_submitted_by_hand_is_known_while_it_waits_and_when_it_runs as test_a_job_submitted_by_hand,
)
from tests.slurm.test_signals_by_hand import (
    test_usr2_to_all_steps_and_to_the_batch_script_is_a_wish_to_save as test_usr2_by_hand,
)
from tools.other_slurm import place
from yatt.adapters.run_folder.ledger import run_is_finished, started_attempts

__all__ = [
    "test_a_job_submitted_by_hand",
    "test_a_killed_launcher_is_followed",
    "test_a_lost_batch_node_leaves_no_zombie",
    "test_a_lost_engine_node_shrinks",
    "test_cancel_saves_and_resume_goes_on",
    "test_usr2_by_hand",
]
pytestmark = [
    pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1600),
    pytest.mark.skipif(not place().exists(), reason="no newer Slurm: tools/other_slurm.py says why"),
]  # fmt: skip


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    made = Cluster(NODES=5, GRACE=10, KILLWAIT=5, SLURMD_TIMEOUT=20, OTHER=place())
    try:
        yield made.up()
    finally:
        made.down()


@pytest.mark.parametrize("layout", ["het", "flat"])
def test_a_preempted_run_comes_back(cluster: Cluster, reference, tmp_path, layout: str) -> None:
    """Once. Slurm 24.11 keeps a job marked as preempted that asks for its next start in the grace time, and
    starts it once more when it has ended, whatever it ended with; that start has nothing to do."""
    run = SubmittedRun(cluster, tmp_path, layout=layout)
    job_id = run.submit()
    run.wait_step(3)
    cluster.sbatch("#!/bin/bash\nsleep 6\n", "--partition=high", "--nodes=3", "--exclusive")
    wait_for(lambda: run_is_finished(run.paths), timeout_s=200, what="the run to finish")
    wait_for(lambda: cluster.squeue() == [], timeout_s=90, what="the job to be gone for good")
    assert ends(run.paths)[0] == (75, "preempted")
    assert len(started_attempts(run.paths)) == 2
    assert run.restarts(job_id) in (1, 2)
    assert run.launcher_log().count("is finished: nothing to do") == run.restarts(job_id) - 1
    run.check(reference)


def test_the_newer_slurm_is_fit_for_a_run(cluster: Cluster) -> None:
    assert cluster.call("scontrol", "--version").startswith("slurm-wlm 24.11")
    site = str(ROOT / "configs" / "sites" / "testcluster.yaml")
    argv = command("diagnose", "--site", site, "--nodes", "2", "--json")
    done = run_to_end(argv, env=cluster.env, cwd=cluster.root, timeout_s=300)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert [f["key"] for f in found["findings"] if f["level"] == "warn"] == ["kill"], found
