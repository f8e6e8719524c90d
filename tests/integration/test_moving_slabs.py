"""Slabs that change between rollout and a GenRM in whole runs: no token is lost or made twice, whatever
moves."""

from pathlib import Path
from typing import Any

import pytest

from tests.bench.oversampling import balance_of
from tests.moving_slabs import JUDGE, double_holders, moving_run, turning_run
from tests.runs import RunFile, rows, yatt
from tests.tiny_models import make_qwen3
from yatt.obs.story.batch_loads import read_batch_loads

pytestmark = pytest.mark.slow
ITERATIONS, REAL_ITERATIONS = 5, 4


def finished(run: RunFile, *command: str) -> list[dict[str, Any]]:
    done = yatt(*(command or ("run", str(run.write()))))
    assert done.returncode == 0, done.stdout + done.stderr
    events = rows(run.run_dir / "events.jsonl")
    assert double_holders(events) == []
    assert not [e for e in events if e["kind"] in ("engine.unfit", "lease.expire", "failure.report")]
    return events


@pytest.mark.parametrize(("place", "ahead"), [("partial", 0), ("disaggregated", 0), ("disaggregated", 1)])
def test_from_a_bad_split_slabs_go_where_the_work_is(tmp_path: Path, place: str, ahead: int):
    run = moving_run(tmp_path, place, ITERATIONS)
    run.settings["rollout"]["ahead"] = ahead
    events = finished(run)
    balance = balance_of(run)
    assert (balance.sampled, balance.restarted) == (balance.trained + balance.left, 0)
    trained = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    judges = [row[f"placement/gpu_sets/{JUDGE}"] for row in trained]
    assert judges[0] == 1 and judges[-1] >= 3, judges
    assert all(0 <= row[f"placement/idle/{role}"] <= 1 for row in trained for role in ("rollout", JUDGE))
    loads = [event for event in events if event["kind"] == "batch.load"]
    assert [event["iteration"] for event in loads] == list(range(1, ITERATIONS + 1))
    speeds = loads[-1]["roles"]
    assert speeds["rollout"]["step_s"] == pytest.approx(0.004, rel=0.5)
    assert speeds[JUDGE]["step_s"] == pytest.approx(0.01, rel=0.5)
    completions = sum(event["num_samples"] for event in loads)
    assert completions == ITERATIONS * 64
    assert max(loads[0]["lengths"]) <= 480 and loads[0]["lengths"] == sorted(loads[0]["lengths"])
    assert {event["attempt"] for event in events} == {1}
    if place == "partial":
        check_shared_slabs(events)


def check_shared_slabs(events: list[dict[str, Any]]) -> None:
    """Moves end with the batch: the trainer gets its slabs back, whatever moves; and the processes of both
    kinds of engines share a slab."""
    by_slab: dict[str, list[str]] = {}
    for event in events:
        if event["kind"] == "lease.grant":
            by_slab.setdefault(event["slab"], []).append(event["holder"])
    assert any({"rollout", JUDGE} <= set(holders) for holders in by_slab.values())
    assert all(holders.count("trainer") >= ITERATIONS for holders in by_slab.values())


def test_roles_take_turns_and_a_resumed_run_goes_on_so(tmp_path: Path):
    """A whole run, and its resumption: walks have neither measured speeds nor the barriers of real nodes."""
    run = turning_run(tmp_path, 3)
    run.settings["checkpoint"]["save_every"] = 1
    finished(run)
    events = finished(run, "resume", str(run.run_dir), "trainer.total_iterations=5")
    balance = balance_of(run)
    assert (balance.sampled, balance.restarted) == (balance.trained + balance.left, 0)
    trained = {row["training/global_step"]: row for row in rows(run.run_dir / "metrics.jsonl")}
    splits = {i: (trained[i]["placement/gpu_sets/rollout"], trained[i][f"placement/gpu_sets/{JUDGE}"])
              for i in range(1, 6)}  # fmt: skip
    assert splits[1] != (4, 0) and splits[3] == splits[4] == splits[5] == (4, 0), splits
    turns = {i for i in splits if splits[i] == (4, 0)}
    begun = [(e["phase"], e["iteration"]) for e in events if e["kind"] == "phase.begin"]
    assert {i for phase, i in begun if phase == "score"} == turns, "and in these batches only"
    choices = [e for e in events if e["kind"] == "split.choose"]
    assert all(e["before"] == {"rollout": 4, JUDGE: 0} for e in choices if e["attempt"] == 2)
    judged = [e for e in events if e["kind"] == "lease.grant" and e["holder"] == JUDGE and e["attempt"] == 2]
    assert len({e["slab"] for e in judged}) == 4, "each GPU set has its turn"
    loads, num_bad = read_batch_loads(run.run_dir / "events.jsonl")
    assert (len(loads), num_bad) == (2, 0), "`yatt simulate RUN` can use every batch of the newest attempt"
    assert all(each.roles[role].slabs == 4 for each in loads for role in ("rollout", JUDGE))


def test_floors_and_ceilings_hold(tmp_path: Path):
    run = moving_run(tmp_path, "disaggregated", ITERATIONS)
    run.settings["placement"].update(min_gpu_sets={"rollout": 3}, max_gpu_sets={JUDGE: 2})
    events = finished(run)
    balance = balance_of(run)
    assert (balance.sampled, balance.restarted) == (balance.trained + balance.left, 0)
    trained = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    assert max(row[f"placement/gpu_sets/{JUDGE}"] for row in trained) == 2
    assert min(row["placement/gpu_sets/rollout"] for row in trained) >= 3
    assert {(e["slab"], e["has_moved"]) for e in events if e["kind"] == "slab.moved"}, "one has moved"


def test_a_fixed_split_moves_nothing_and_is_measured_too(tmp_path: Path):
    run = moving_run(tmp_path, "partial", 2, split="fixed")
    events = finished(run)
    kinds = {event["kind"] for event in events}
    assert not kinds & {"slab.move", "slab.moved", "split.choose"}
    loads, num_bad = read_batch_loads(run.run_dir / "events.jsonl")
    assert (len(loads), num_bad) == (2, 0), "`yatt simulate RUN` can use every batch"
    starts = [e["worker"] for e in events if e["kind"] == "worker.start" and "genrm" in e["worker"]]
    assert len(starts) == 1, "engines of other roles are not started"


def test_real_engines_move(tmp_path: Path):
    """Real weights are read by engines that come late; scripted engines have none."""
    judge = make_qwen3(tmp_path / "judge", tied=False, seed=1)
    section = {"name": "judge", "model": judge, "dtype": "float32", "template": "{prompt}{completion}",
               "verdict": {"pattern": "([a-m])", "scores": {"a": 1.0, "b": 0.5}}, "max_tokens": 96,
               "max_num_seqs": 1, "retries": 0, "temperature": 1.0, "on_unparsable": "score",
               "kv_cache_bytes": 32 << 20, "enforce_eager": True}  # fmt: skip
    run = RunFile(tmp_path, {
        "run": {"deterministic": False},
        "launch": {"nodes": 2, "gpus_per_node": 1, "engine_gpus_per_node": 4, "start_timeout_s": 300},
        "rollout": {"engine": "vllm", "kv_cache_bytes": 32 << 20, "enforce_eager": True, "n": 4,
                    "max_response_tokens": 48, "max_num_seqs": 8},
        "genrms": [section],
        "placement": {"mode": "disaggregated", "trainer_nodes": 1, "genrm_gpu_sets": 1, "split": "dynamic"},
        "trainer": {"total_iterations": REAL_ITERATIONS, "train_batch_size": 8, "mini_batch_size": 8,
                    "max_tokens_per_micro_batch": 512},
        "checkpoint": {"save_every": REAL_ITERATIONS}, "sync": {"probe_prompts": 2},
    })  # fmt: skip
    events = finished(run)
    moved = [e for e in events if e["kind"] == "slab.moved" and e["has_moved"]]
    assert len(moved) >= 2
    balance = balance_of(run, num_samples=8 * 4)
    assert (balance.sampled, balance.restarted) == (balance.trained + balance.left, 0)
    checks = [e for e in events if e["kind"] == "weights.check"]
    assert {e["policy_version"] for e in checks} == set(range(REAL_ITERATIONS + 1)), (
        "the engines that stay take every version"
    )
