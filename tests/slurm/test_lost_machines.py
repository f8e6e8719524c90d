"""Nodes and controllers die, or Slurm loses sight of them: the run goes on; stale attempts change nothing."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.runs import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, ends
from yatt.adapters.run_folder.ledger import STARTED, started_attempts, write_record
from yatt.adapters.slurm.requeue import Requeue
from yatt.adapters.slurm.slurm import Slurm, expand_node_list
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.store.store import FolderStore
from yatt.launch.attempt.join import GRACE_S
from yatt.paths import RunPaths

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]


def hosts(run: SubmittedRun) -> list[str]:
    """Slurm's name of each of the run's nodes, in the newest attempt."""
    started = started_attempts(run.paths)[-1].started["hosts"]
    return [*started["trainer"], *started.get("engines", ())]


def test_a_lost_engine_node_shrinks_the_pool_and_a_restart_in_the_same_start_does_without_it(
    cluster: Cluster, reference, tmp_path
):
    """The trainer does not notice the loss; then one of its controllers ends, and the attempt with it."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(2)
    cluster.crash(hosts(run)[3])
    lost = run.wait_event("node.lost", node=3)
    assert lost["goes_on"] is True
    run.wait_step(run.step() + 2)
    assert len(started_attempts(run.paths)) == 1
    os.kill(run.controller(1), signal.SIGKILL)
    run.hurry()
    run.wait_finished(job_id)
    assert started_attempts(run.paths)[1].started["absent"] == [3]
    assert (run.restarts(job_id), [code for code, _ in ends(run.paths)]) == (0, [1, 0])
    run.check(reference, dead={3})


def test_an_engine_node_whose_controller_is_killed_joins_again(cluster: Cluster, reference, tmp_path):
    """Its step starts the next one; no other node, and not Slurm, has anything to do with it."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(2)
    for life in (2, 3):
        os.kill(run.controller(3), signal.SIGKILL)
        run.wait_event("node.joined", timeout_s=90, node=3, life=life)
    run.hurry()
    run.wait_finished(job_id)
    assert run.restarts(job_id) == 0
    assert [code for code, _ in ends(run.paths)] == [0]
    run.check(reference)


def test_what_a_killed_step_of_an_engine_node_has_left_goes_at_the_end(cluster: Cluster, reference, tmp_path):
    """A whole run: it goes on without the node, and no start follows that would find what is left there."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(2)
    parent = int(Path(f"/proc/{run.controller(3)}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    run.wait_event("node.lost", node=3)
    assert run.file.leftovers()
    run.hurry()
    run.wait_finished(job_id)
    assert [code for code, _ in ends(run.paths)] == [0]
    run.check(reference)


def test_another_job_takes_the_place_of_a_dead_engine_node(cluster: Cluster, reference, tmp_path):
    """And gives it back without harm: at the end nodes of it are told to leave, by Slurm."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD.replace("sleep(0.2)", "sleep(1.2)"))
    job_id = run.submit()
    run.wait_step(2)
    gone = hosts(run)[3]
    cluster.crash(gone)
    run.wait_event("node.lost", node=3)
    done = run.yatt("join", str(run.paths.root))
    assert done.returncode == 0, done.stdout + done.stderr
    joining = re.search(r"submitted job (\d+)", done.stdout)[1]
    joined = run.wait_event("node.joined", timeout_s=GRACE_S + 90, node=3, life=2)
    place = cluster.show_job(int(joining))["NodeList"]
    assert place != gone
    checks = lambda: [e for e in run.events("weights.check", node=3) if e["wall"] > joined["wall"]]  # noqa: E731
    wait_for(checks, timeout_s=60, what="its engine to have the weights")
    cluster.call("scancel", joining)
    run.wait_event("node.lost", timeout_s=60, node=3, life=2)
    run.hurry()
    run.wait_finished(job_id)
    assert run.restarts(job_id) == 0
    assert [code for code, _ in ends(run.paths)] == [0]
    wait_for(lambda: cluster.squeue() == [], timeout_s=90, what="no job left")
    run.check(reference, dead={3})


@pytest.mark.parametrize("node", [3, 1], ids=["engine", "trainer"])
def test_a_machine_that_dies_before_its_controller_is_there_is_left_out_once_slurm_knows(
    cluster: Cluster, reference, tmp_path, node
):
    """Nobody else can know it, and the attempt would wait for it until `launch.start_timeout_s`."""
    settings = {"launch": {"start_timeout_s": 240.0}}
    run = SubmittedRun(cluster, tmp_path, settings)
    job_id = run.submit()
    run.wait_attempts(1)
    gone = hosts(run)[node]
    entry = run.paths.controller_record(1, node)
    cluster.crash(gone)
    assert not run.paths.all_endpoints(1).exists(), f"too late; {entry.exists()=}"
    run.wait_finished(job_id)
    assert node == 1 or ends(run.paths)[0][1] == "node3 is gone"
    assert run.restarts(job_id) == (1 if node == 1 else 0), "for a trainer node, by Slurm or by the launcher"
    assert gone not in hosts(run) or started_attempts(run.paths)[-1].started["absent"] == [node]
    run.check(reference, dead={node})


def test_a_lost_trainer_node_costs_a_requeue_without_it(cluster: Cluster, reference, tmp_path):
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(2)
    gone = hosts(run)[1]
    cluster.crash(gone)
    run.wait_event("node.lost", node=1)
    run.hurry()
    run.wait_finished(job_id)
    assert run.restarts(job_id) == 1
    assert "node1 is gone" in ends(run.paths)[0][1]
    assert gone not in hosts(run)
    run.check(reference)


HET_JOB = """#!/bin/bash
#SBATCH --nodes=2 --no-kill --requeue
#SBATCH hetjob
#SBATCH --nodes=2 --no-kill --requeue
trap '' TERM
while :; do sleep 1; done
"""


def test_a_job_that_lost_a_node_is_kept_off_no_other_that_it_needs(cluster: Cluster, tmp_path):
    """Slurm shows three nodes while it is completing; four are up, so that of the dead leader is needed."""
    job_id = cluster.sbatch(HET_JOB)
    cluster.wait_state(job_id, "RUNNING")
    names = ("trainer", "engines")
    parts = zip(names, cluster.components(job_id), strict=True)
    hosts = {name: expand_node_list(part["NodeList"]) for name, part in parts}
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    write_record(paths, 1, STARTED, {"hosts": hosts})
    leader, gone = hosts["trainer"]
    cluster.call("scontrol", "update", f"NodeName={gone}", "State=DOWN", "Reason=dead")
    wait_for(
        lambda: cluster.show_job(job_id)["NumNodes"] == "1", timeout_s=60, what="the job without the node"
    )
    asked = Requeue(paths=paths, attempt=1, job_id=str(job_id), restarts=0, slurm=Slurm(cluster.env))
    assert asked.succeed([leader], cluster.env).code == 0
    assert [part["ExcNodeList"] for part in cluster.components(job_id)] == ["(null)", "(null)"]
    wait_for(lambda: cluster.show_job(job_id)["Restarts"] == "1", timeout_s=60, what="the next start")
    cluster.wait_state(job_id, "RUNNING", timeout_s=90)


def test_a_lost_batch_node_leaves_no_zombie(cluster: Cluster, reference, tmp_path):
    """The launcher and the leader die with it; a survivor asks Slurm for the next start, once."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(2)
    gone = hosts(run)[0]
    cluster.crash(gone)
    asked = run.wait_event("requeue")
    run.hurry()
    assert asked["reason"] == "the leader is gone"
    run.wait_finished(job_id)
    assert len(run.events("requeue")) == 1
    assert run.restarts(job_id) == 1
    assert len(started_attempts(run.paths)) == 2
    assert gone not in hosts(run)
    run.check(reference)


def test_a_lost_batch_node_where_nothing_is_requeued_leaves_one_successor(
    cluster: Cluster, reference, tmp_path
):
    """A survivor submits the next job in the dead launcher's place, and ends this one."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD, requeue="chain")
    first_id = run.submit()
    run.wait_step(2)
    gone = hosts(run)[0]
    cluster.crash(gone)
    asked = run.wait_event("requeue")
    run.hurry()
    assert (asked["reason"], asked["code"]) == ("the leader is gone", 0)
    run.wait_attempts(2)
    next_id = started_attempts(run.paths)[1].started["job"]
    assert next_id != first_id
    run.wait_finished(next_id)
    assert len(run.events("requeue")) == 1
    assert (run.restarts(first_id), run.restarts(next_id)) == (0, 0)
    assert cluster.squeue() == [], "one successor"
    assert len(started_attempts(run.paths)) == 2
    assert gone not in hosts(run)
    run.check(reference)


def test_a_stale_attempt_writes_nowhere_that_counts(cluster: Cluster, reference, tmp_path):
    """slurmd of the batch node stands still: its launcher and leader live on beside the new start."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(2)
    paused_node, stale = hosts(run)[0], started_attempts(run.paths)[0].started["pid"]
    leader = run.controller(0)
    cluster.pause(paused_node)
    os.kill(leader, signal.SIGSTOP)  # it will wake in the middle of the newer attempt's work
    cluster.call("scontrol", "requeue", job_id)
    wait_for(lambda: len(started_attempts(run.paths)) == 2, timeout_s=120, what="the next start")
    assert paused_node not in hosts(run)
    run.wait_step(started_attempts(run.paths)[1].started["committed"] + 2)
    os.kill(leader, signal.SIGCONT)
    run.hurry()
    run.wait_finished(job_id)
    wait_for(lambda: not os.path.exists(f"/proc/{leader}"), what="the stale attempt to end itself")
    assert len(started_attempts(run.paths)) == 2, "the stale attempt claimed no attempt"
    heir = started_attempts(run.paths)[1].started
    late = [e for e in run.events("ckpt.commit", attempt=1) if e["wall"] > heir["wall"]]
    # It may stand still between a commit, which the newer attempt has seen, and saying so.
    late = [e for e in late if e["iteration"] > heir["committed"]]
    assert late == [], "the stale attempt committed nothing after the newer attempt had begun"
    assert Checkpoints(FolderStore(run.paths.root / "checkpoints"), 0).newest().stale == ()
    cluster.unpause(paused_node)
    wait_for(
        lambda: not os.path.exists(f"/proc/{stale}"), timeout_s=60, what="the stale attempt's launcher to end"
    )
    run.check(reference)


def test_lost_controllers_of_trainers_cost_an_attempt_each_but_no_requeue(
    cluster: Cluster, reference, tmp_path
):
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD)
    job_id = run.submit()
    run.wait_step(2)
    os.kill(run.controller(1), signal.SIGKILL)
    run.wait_attempts(2)
    run.wait_step(started_attempts(run.paths)[1].started["committed"] + 1)
    os.kill(run.controller(0), signal.SIGKILL)
    run.hurry()
    run.wait_finished(job_id)
    assert run.restarts(job_id) == 0
    (of_trainer, of_leader, (code, _)) = ends(run.paths)
    assert (of_trainer[0], of_leader[0], code) == (1, 1, 0)
    assert "node1 was killed by SIGKILL" in of_trainer[1]
    assert "node0 was killed by SIGKILL" in of_leader[1]
    run.check(reference)


def test_a_holder_that_wakes_after_its_lease_ran_out_is_refused(cluster: Cluster, reference, tmp_path):
    run = SubmittedRun(cluster, tmp_path, {"lease": {"renew_s": 0.5, "ttl_s": 10.0, "term_s": 1}})
    job_id = run.submit()
    run.wait_step(2)
    paused = run.pid("rollout-n3s0")
    os.kill(paused, signal.SIGSTOP)
    run.wait_event("lease.expire", slab="n3s0")
    wait_for(lambda: run.pid("rollout-n3s0") != paused, what="the engine to be replaced")
    assert not os.path.exists(f"/proc/{paused}"), "it was killed before another got its slab"
    run.wait_finished(job_id)
    assert (run.restarts(job_id), [code for code, _ in ends(run.paths)]) == (0, [0])
    run.check(reference)
