"""A rollout engine over two nodes: one of its ranks ends, stands still or loses its node."""

import json
import signal
from pathlib import Path

import pytest

from tests.faults.test_lost_nodes import controller
from tests.faults.test_lost_samples import finish
from tests.faults.test_resume_exact import final_state, metrics
from tests.moving_slabs import double_holders
from tests.runs import RunFile, kill, rows, start, wait_for, yatt
from tests.spanning_engines import LEASE, SCRIPT, events, pid_of, scripted_run, starts_of
from tests.tiny_models import make_scripted_model

pytestmark = pytest.mark.faults
RANKS = "rollout-n0s0r0", "rollout-n1s0r1"
ITERATIONS = 4


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """The same run, undisturbed, with one engine on each node."""
    run = scripted_run(tmp_path_factory.mktemp("calm"), tp_size=1, iterations=ITERATIONS)
    assert (done := yatt("run", str(run.write()))).returncode == 0, done.stdout
    return run


def check_as_calm(run: RunFile, calm: RunFile) -> None:
    assert attempts(run) == {1}
    assert double_holders(events(run)) == []
    assert not events(run, "failure.report", "rollout.group.drop")
    assert metrics(run) == metrics(calm)
    assert final_state(run) == final_state(calm)


def attempts(run: RunFile) -> set[int]:
    return {event["attempt"] for event in events(run)}


def sampling(run: RunFile, iteration: int) -> None:
    wait_for(
        lambda: len(events(run, "rollout.group.open")) >= iteration,
        timeout_s=60,
        what="a batch to be sampled",
    )


def begun(run: RunFile, phase: str, iteration: int) -> None:
    """Waits for a phase of an iteration."""
    wait_for(
        lambda: (phase, iteration) in {(e["phase"], e["iteration"]) for e in events(run, "phase.begin")},
        timeout_s=90,
        what=f"{phase} of iteration {iteration}",
    )


def test_a_rank_that_ends_or_stands_still_costs_both_a_start_and_no_bit(
    tmp_path: Path, calm: RunFile
) -> None:
    """While it samples and while it sleeps, one after the other. The walk of blocks knows nodes, not ranks,
    and `test_engine_ranks.py` has no leases, no other node's controller and no training."""
    run = scripted_run(tmp_path, iterations=ITERATIONS)
    process = start("run", str(run.write()))
    sampling(run, 2)
    assert kill(pid_of(run, RANKS[1]))
    begun(run, "rollout", 3)
    assert kill(pid_of(run, RANKS[0], 2), signal.SIGSTOP), "the one that takes the requests"
    pid = pid_of(run, RANKS[1], 3)
    begun(run, "train", 3)
    assert kill(pid), "asleep; it is missed when it is woken"
    finish(process)
    assert starts_of(run) == [f"{name}.{n}" for name in RANKS for n in (1, 2, 3, 4)]
    check_as_calm(run, calm)


def spread(folder: Path, **settings: object) -> RunFile:
    """One trainer node, and two engines over two nodes each."""
    run = RunFile(folder, {
        "run": {"deterministic": False},
        "launch": {"nodes": 5, "gpus_per_node": 1, "node_silence_s": 10},
        "placement": {"mode": "disaggregated", "trainer_nodes": 1},
        "rollout": {"tp_size": 2, "max_num_seqs": 4}, "lease": LEASE, **settings,
    })  # fmt: skip
    run.write()
    (folder / "policy" / "scripted.json").write_text(json.dumps(SCRIPT))
    return run


def test_a_lost_node_takes_its_block_along_and_both_come_back_together(tmp_path: Path) -> None:
    run = spread(tmp_path, trainer={"total_iterations": 12})
    process = start("run", str(run.write()))
    sampling(run, 2)
    kill(controller(run, 3))
    finish(process)
    assert attempts(run) == {1}
    assert sorted({e["node"] for e in events(run, "node.lost")}) == [3, 4]
    joined = events(run, "node.joined")
    assert sorted(e["node"] for e in joined) == [3, 4]
    begun = {e["t"]: e["iteration"] for e in events(run, "phase.begin")}
    at = {max((t, i) for t, i in begun.items() if t < e["t"])[1] for e in joined}
    assert len(at) == 1, "both were admitted at the same publication"
    later = {e["worker"] for e in events(run, "weights.check")}
    assert {"rollout-n3s0r0.1", "rollout-n4s0r1.1"} <= later
    check_slices(run)


def check_slices(run: RunFile) -> None:
    """Each node has fetched its slices, in each life; nodes at the same place of an engine the same ones."""
    fetched = events(run, "weights.fetch")
    sizes = {node: {e["size_bytes"] for e in fetched if e["node"] == node} for node in (1, 2, 3, 4)}
    (whole,) = {e["size_bytes"] for e in events(run, "weights.publish")}
    assert sizes[1] == sizes[3] and sizes[2] == sizes[4] and all(len(each) == 1 for each in sizes.values())
    assert all(0.4 * whole < size < 0.65 * whole for each in sizes.values() for size in each)
    assert {e["unknown_bytes"] for e in fetched} == {0}


def test_a_genrm_over_two_nodes_beside_rollout_engines_of_one_slot(tmp_path: Path, calm: RunFile) -> None:
    """Four nodes of two slots: the last two nodes' slots are one engine of four processes."""
    judge = make_scripted_model(tmp_path / "judge", mean_tokens=3)
    (Path(judge) / "model.safetensors").write_bytes(b"")
    section = {"name": "judge", "model": judge, "template": "{completion}", "engine": "scripted",
               "tp_size": 4, "verdict": {"pattern": "([a-m])", "scores": {}}, "max_model_tokens": 64,
               "on_unparsable": "score", "unparsable_score": 0.5}  # fmt: skip
    run = scripted_run(
        tmp_path / "run", tp_size=1, iterations=2, genrms=[section],
        launch={"nodes": 4, "gpus_per_node": 2}, placement={"mode": "partial", "genrm_gpu_sets": 2},
    )  # fmt: skip
    process = start("run", str(run.write()))
    sampling(run, 2)
    wait_for(lambda: "genrm-judge-n3s0r3.1" in starts_of(run, "genrm"), timeout_s=60, what="rank 3")
    (event,) = [e for e in events(run, "worker.start") if e["worker"] == "genrm-judge-n3s0r3.1"]
    kill(int(event["pid"]))
    finish(process)
    assert attempts(run) == {1}
    ranks = ["n2s0r0", "n2s0r1", "n3s0r2", "n3s0r3"]
    assert starts_of(run, "genrm") == [f"genrm-judge-{rank}.{n}" for rank in ranks for n in (1, 2)]
    assert len(starts_of(run, "rollout")) == 4, "two engines on each of the first two nodes, none on others"
    assert double_holders(events(run)) == []


def test_a_real_engine_over_two_nodes_samples_updates_sleeps_is_killed_and_comes_back(tmp_path: Path) -> None:
    rollout = {"engine": "vllm", "tp_size": 2, "kv_cache_bytes": 32 << 20, "enforce_eager": True}
    run = RunFile(tmp_path, {
        "run": {"deterministic": False}, "rollout": rollout, "trainer": {"total_iterations": 4},
        "launch": {"nodes": 2, "start_timeout_s": 300, "phase_timeout_s": 300}, "sync": {"probe_prompts": 2},
    })  # fmt: skip
    process = start("run", str(run.write()))
    sampling(run, 2)
    assert kill(pid_of(run, RANKS[1]))
    finish(process)
    assert attempts(run) == {1} and double_holders(events(run)) == []
    checks = events(run, "weights.check")
    assert {e["policy_version"] for e in checks} >= {0, 1, 2, 3}
    assert all(e["difference"] < 1e-5 for e in checks), "log-probs are the trainer's, in float32"
    assert {f"{name}.2" for name in RANKS} <= {e["worker"] for e in checks}
    trained = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    tokens = sum(16 * row["response_length/mean"] for row in trained)
    assert sum(row["rollout/tokens"] for row in trained) == pytest.approx(tokens), "no token is made twice"
