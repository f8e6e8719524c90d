"""What people send with `scancel --signal`: the run saves and goes on, and nobody dies of it."""

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, ends
from yatt.adapters.run_folder.ledger import started_attempts
from yatt.core.attempts.outcome import BY_HAND

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1200)]


def test_usr2_to_all_steps_and_to_the_batch_script_is_a_wish_to_save(cluster: Cluster, reference, tmp_path):
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(2)
    cluster.call("scancel", "--signal=USR2", job_id)
    run.wait_attempts(2)
    run.wait_step(4)
    cluster.call("scancel", "--batch", "--signal=USR2", job_id)
    run.wait_attempts(3)
    run.hurry()
    run.wait_finished(job_id)
    assert ends(run.paths)[:2] == [(75, BY_HAND), (75, BY_HAND)]
    assert run.restarts(job_id) == 2
    first, second, third = started_attempts(run.paths)
    assert second.started["committed"] == first.ended["committed"] >= 2
    assert third.started["committed"] == second.ended["committed"] >= 4
    assert not [e for e in run.events("worker.end") if "SIGUSR" in e["how"]], "workers do not hear it"
    run.check(reference)
