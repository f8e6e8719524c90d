"""Nodes that do not pass the check before an attempt: the run goes on without them, or elsewhere."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_messages import Receiver, receiver as receiver
from tests.runs import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, ends
from yatt.adapters.run_folder.ledger import started_attempts
from yatt.errors import EXIT_DO_NOT_RESTART

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]

CHECK = """
case " $(cat $(dirname $0)/bad) " in
*" $SLURMD_NODENAME "*) echo "the disk of $SLURMD_NODENAME is broken"; exit 1 ;;
esac
"""


def run_with(
    cluster: Cluster, folder: Path, bad: str, settings: dict[str, Any] | None = None, **site: Any
) -> SubmittedRun:
    """A run whose site has a check of its own, which `bad` nodes do not pass."""
    (folder / "check.sh").write_text(CHECK)
    (folder / "bad").write_text(bad)
    own = {"command": ["sh", str(folder / "check.sh")]}
    return SubmittedRun(cluster, folder, settings, node_check=own, **site)


def test_an_unfit_engine_node_is_left_out_in_the_same_start(
    cluster: Cluster, reference: dict[str, Any], tmp_path: Path
) -> None:
    run = run_with(cluster, tmp_path, "n4")
    job_id = run.submit()
    run.wait_finished(job_id)
    assert run.restarts(job_id) == 0
    (code, why), (done, _) = ends(run.paths)
    assert (code, done) == (None, 0)
    assert why == "node3 is unfit: sh, exit code 1: the disk of n4 is broken"
    assert started_attempts(run.paths)[1].started["absent"] == [3]
    run.check(reference)


def test_unfit_nodes_that_the_run_needs_cost_a_start_each_and_are_not_given_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    """What the user keeps each component off stays so."""
    parts = {"trainer": {"sbatch_args": {"exclude": "n5"}}, "engines": {"sbatch_args": {"exclude": "n4"}}}
    sizes = {"launch": {"nodes": 2}, "placement": {"trainer_nodes": 1}}
    run = run_with(cluster, tmp_path, "n1 n3", sizes, components=parts)
    job_id = run.submit()
    run.wait_finished(job_id, timeout_s=240)
    assert run.restarts(job_id) == 2
    assert [code for code, _ in ends(run.paths)] == [None, None, 0]
    assert "node0 is unfit" in ends(run.paths)[0][1]
    assert "node1 is unfit" in ends(run.paths)[1][1]
    trainer, engines = cluster.components(int(job_id))
    assert set(trainer["ExcNodeList"].split(",")) == {"n5", "n1", "n3"}
    assert set(engines["ExcNodeList"].split(",")) == {"n4", "n1", "n3"}
    hosts = started_attempts(run.paths)[-1].started["hosts"]
    assert hosts == {"trainer": ["n2"], "engines": ["n5"]}
    run.check_checkpoints()
    run.check_nothing_left(())


def test_what_every_node_says_ends_the_run_keeps_the_job_off_none_and_is_told(
    cluster: Cluster, tmp_path: Path, receiver: Receiver
) -> None:
    told = {"logging": {"webhook_url": receiver.url}}
    run = run_with(cluster, tmp_path, "n1 n2 n3 n4 n5", told)
    job_id = run.submit()
    run.wait_said("attempts in a row failed")
    assert {code for code, _ in ends(run.paths)} == {1}
    assert len(ends(run.paths)) == 3
    assert (
        "no node is fit: node0 is unfit: sh, exit code 1: the disk of n1 is broken" in ends(run.paths)[0][1]
    )
    cluster.wait_state(int(job_id), "FAILED")
    assert cluster.show_job(int(job_id))["ExitCode"] == f"{EXIT_DO_NOT_RESTART}:0"
    assert run.restarts(job_id) == 0
    assert "the disk of n1 is broken" in run.yatt("status", str(run.paths.root)).stdout
    run.check_nothing_left(())
    (message,) = receiver.got
    assert message["state"] == "failed"
    assert "the disk of n1 is broken" in message["text"]


def test_a_signal_during_the_check_is_not_lost_and_kills_nobody(
    cluster: Cluster, reference: dict[str, Any], tmp_path: Path
) -> None:
    own = {"command": ["sh", "-c", f"touch {tmp_path}/checking-$SLURMD_NODENAME; sleep 6"]}
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD, node_check=own)
    job_id = run.submit()
    wait_for(lambda: len(list(tmp_path.glob("checking-*"))) == 4, timeout_s=90, what="all four checks")
    cluster.call("scancel", f"--signal={signal.SIGUSR2.name}", job_id)
    run.wait_attempts(2)
    assert ends(run.paths)[0] == (75, "a signal was sent by hand")
    run.hurry()
    run.wait_finished(job_id)
    assert run.restarts(job_id) == 1
    run.check(reference)


def test_a_node_that_the_job_cannot_do_without_is_tried_again(
    cluster: Cluster, reference: dict[str, Any], tmp_path: Path
) -> None:
    """Kept off it the job would wait for ever, also after it is mended."""
    cluster.call("scontrol", "update", "NodeName=n5", "State=DRAIN", "Reason=none to spare")
    run = run_with(cluster, tmp_path, "n1")
    job_id = run.submit()
    wait_for(lambda: run.restarts(job_id) >= 1, timeout_s=90, what="a start off the node")
    (tmp_path / "bad").write_text("")
    run.wait_finished(job_id)
    assert cluster.show_job(int(job_id))["ExcNodeList"] == "(null)"
    assert "node0 is unfit" in ends(run.paths)[0][1]
    run.check(reference)
