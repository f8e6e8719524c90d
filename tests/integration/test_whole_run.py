"""Whole runs as a user starts them, with real engines: placements, layouts, stores, stopping and looking."""

import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunFile, kill, living, rows, start, wait_for, yatt
from tests.tiny_models import make_fp8, make_qwen3, make_scripted_model, make_sigmoid_moe
from tests.unit.adapters.test_judge_api import Service, says

pytestmark = pytest.mark.slow

SMALL = {"kv_cache_bytes": 32 << 20, "enforce_eager": True}
REHEARSED = {"trainer": "scripted"}
"""Of runs whose subject is their rewards or their folder."""


def judge(folder: Path) -> dict[str, Any]:
    model = make_qwen3(folder / "judge", tied=False, seed=1)
    return {"name": "judge", "model": model, "dtype": "float32", "template": "{prompt}{completion}",
            "verdict": {"pattern": "([a-m])", "scores": {"a": 1.0, "b": 0.5}}, "max_tokens": 6,
            "temperature": 1.0, "on_unparsable": "score", **SMALL}  # fmt: skip


def finished(run: RunFile) -> list[dict[str, Any]]:
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert living(run.run_dir) == {}
    return rows(run.run_dir / "metrics.jsonl")


def test_colocated_with_tensor_parallel_trainer_and_real_judge(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {
        "run": {"deterministic": False},
        "rollout": {"engine": "vllm", **SMALL},
        "genrms": [judge(tmp_path)],
        "placement": {"mode": "colocated"},
        "trainer": {"total_iterations": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        "algorithm": {"kl_in": "loss", "kl_type": "k3"},
        "sync": {"probe_prompts": 2, "tolerance": 1.0e-4},
    })  # fmt: skip
    check_of_two(finished(run))
    holders = {e["holder"] for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "lease.grant"}
    assert holders == {"trainer", "rollout", "genrm:judge"}


def check_of_two(written: list[dict[str, Any]]) -> None:
    """Two iterations: engines sampled what the trainer computes, and the judge was asked."""
    assert [row["training/global_step"] for row in written] == [1, 2]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in written)
    assert all(row["genrm/judge/asked"] >= 16 for row in written)


def test_two_narrow_engines_take_turns_with_a_judge_on_both_slots(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {
        "launch": {"nodes": 1, "gpus_per_node": 2},
        "run": {"deterministic": False},
        "rollout": {"engine": "vllm", **SMALL},
        "genrms": [{**judge(tmp_path), "tp_size": 2}],
        "trainer": {"total_iterations": 2},
        "sync": {"probe_prompts": 2, "tolerance": 1.0e-4},
    })  # fmt: skip
    check_of_two(finished(run))
    events = rows(run.run_dir / "events.jsonl")
    loaded = {(e["worker"], e["policy_version"]) for e in events if e["kind"] == "weights.check"}
    assert loaded == {(f"rollout-n0s0e{index}.1", version) for index in range(2) for version in range(3)}
    assert not [e for e in events if e["kind"] in ("lease.expire", "engine.expire", "lease.not_free")]


def test_disaggregated_with_real_engines_on_nodes_of_their_own(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {
        "launch": {"nodes": 3},
        "run": {"deterministic": False},
        "rollout": {"engine": "vllm", **SMALL},
        "genrms": [judge(tmp_path)],
        "placement": {"mode": "disaggregated", "trainer_nodes": 1, "genrm_gpu_sets": 1},
        "trainer": {"total_iterations": 3},
        "sync": {"probe_prompts": 2, "tolerance": 1.0e-4},
    })  # fmt: skip
    written = finished(run)
    assert [row["training/global_step"] for row in written] == [1, 2, 3]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in written), "weights are the newest"
    assert all(row["genrm/judge/asked"] >= 16 for row in written)
    events = rows(run.run_dir / "events.jsonl")
    grants = sorted((e["slab"], e["holder"]) for e in events if e["kind"] == "lease.grant")
    assert grants == [("n0s0", "trainer"), ("n1s0", "rollout"), ("n2s0", "genrm:judge")]
    fetched = [e["policy_version"] for e in events if e["kind"] == "weights.fetch"]
    assert fetched == [0, 1, 2, 3]


def test_pipeline_parallel_with_untied_embeddings(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {
        "rollout": {"engine": "vllm", **SMALL},
        "trainer": {"total_iterations": 2, "pipeline_model_parallel_size": 2},
        "sync": {"probe_prompts": 2, "tolerance": 1.0e-4},
    })  # fmt: skip
    make_qwen3(tmp_path / "policy", tied=False, seed=4)
    assert len(finished(run)) == 2
    from safetensors import safe_open

    (weights,) = (run.run_dir / "model").glob("*.safetensors")
    with safe_open(weights, "pt") as trained:
        assert "lm_head.weight" in trained.keys()  # noqa: SIM118 (not a dict)
    assert (run.run_dir / "model" / "tokenizer.json").exists(), "the trained model can be used as it is"


TWO = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SPREAD = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


def test_a_policy_with_experts_is_trained_and_published(tmp_path: Path) -> None:
    """By the fallback engine; `test_recipes_small.py` has vLLM, with tensor parallel ranks too."""
    run = RunFile(tmp_path, {
        "run": {"deterministic": False},
        "rollout": {"engine": "transformers", **SMALL},
        "trainer": {"total_iterations": 2, **SPREAD},
        "sync": {"probe_prompts": 2, "tolerance": 1.0e-4},
    })  # fmt: skip
    make_qwen3(tmp_path / "policy", tied=False, seed=4, experts=4)
    written = finished(run)
    assert [row["training/global_step"] for row in written] == [1, 2]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in written)
    checks = [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "weights.check"]
    assert {e["policy_version"] for e in checks} == {0, 1, 2}
    assert all(e["difference"] < 1e-4 for e in checks), "the engines have the experts of every version"
    from safetensors import safe_open

    (weights,) = (run.run_dir / "model").glob("*.safetensors")
    with safe_open(weights, "pt") as trained, safe_open(tmp_path / "policy/model.safetensors", "pt") as first:
        assert set(trained.keys()) == set(first.keys())
        name = "model.layers.0.mlp.experts.3.up_proj.weight"
        assert not trained.get_tensor(name).equal(first.get_tensor(name))


def test_a_family_with_experts_trains_a_whole_run(tmp_path: Path) -> None:
    """DeepSeek-V3 is in `test_recipes_small.py`."""
    run = RunFile(tmp_path, {
        "run": {"deterministic": False},
        "rollout": {"engine": "vllm", **SMALL},
        "trainer": {"total_iterations": 2, **TWO, **SPREAD},
        "sync": {"probe_prompts": 2, "tolerance": 1.0e-4},
    })  # fmt: skip
    make_sigmoid_moe(tmp_path / "policy", "glm4_moe", seed=4)
    finished(run)
    checks = [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "weights.check"]
    assert {e["policy_version"] for e in checks} == {0, 1, 2}
    assert all(e["difference"] < 1e-5 for e in checks), "the engines have the biases of every version"


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_folder_in_fp8_is_trained_in_float32_and_exported_so(tmp_path: Path, engine: str) -> None:
    run = RunFile(tmp_path, {
        "run": {"deterministic": False},
        "rollout": {"engine": engine, **SMALL},
        "trainer": {"total_iterations": 1, **SPREAD},
        "sync": {"probe_prompts": 2, "tolerance": 1.0e-4},
    })  # fmt: skip
    make_sigmoid_moe(tmp_path / "source", "deepseek_v3", seed=4)
    make_fp8(tmp_path / "policy", tmp_path / "source")
    finished(run)
    checks = [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "weights.check"]
    assert {e["policy_version"] for e in checks} == {0, 1}
    assert all(e["difference"] < 1e-5 for e in checks), "the engine has the trainer's dequantised weights"
    config = json.loads((run.run_dir / "model/config.json").read_text())
    assert "quantization_config" not in config
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run.run_dir / "model")


def test_the_fallback_engine_runs_the_same_loop(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {
        "rollout": {"engine": "transformers"},
        "trainer": {"total_iterations": 2},
        "sync": {"probe_prompts": 2, "tolerance": 1.0e-4},
    })  # fmt: skip
    written = finished(run)
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in written)
    check_efficiency(written[-1], num_ranks=2)


def check_efficiency(row: dict[str, Any], num_ranks: int) -> None:
    """Efficiency is given for each role, and agrees with tokens and seconds of the same row."""
    rank_s, num_tokens = row["timing_s/update_actor"] * num_ranks, row["perf/total_num_tokens"]
    assert row["perf/throughput/trainer"] * rank_s == pytest.approx(num_tokens)
    num_weights = 2 * (64 * 32 * (4 + 4 + 2 + 2) + 3 * 64 * 128)  # of the layers
    flops_per_weight = row["perf/tflops_per_gpu/actor"] * 1e12 * rank_s / (num_weights * num_tokens)
    assert 5 < flops_per_weight < 7, "six, more for attention and the head, less for each last token"
    assert "perf/mfu/actor" not in row, "the peak of a CPU is not known"
    assert row["perf/throughput/rollout"] > 0
    for role in ("trainer", "rollout"):
        assert 0.05 < row[f"perf/host_memory_gb/{role}"] < row["perf/cpu_memory_used_gb"]
        assert row[f"perf/max_host_memory_gb/{role}"] > 0.05


def test_a_run_on_s3_goes_on_from_its_bucket_after_everything_was_killed(
    tmp_path: Path, s3_endpoint: str
) -> None:
    options = {"endpoint_url": s3_endpoint}
    run = RunFile(tmp_path, {
        "trainer": {"total_iterations": 8},
        "checkpoint": {"url": "s3://checkpoints/whole-run", "storage_options": options, "save_every": 1},
    })  # fmt: skip
    file = str(run.write())
    process = start("run", file)
    wait_for(
        lambda: [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "ckpt.commit"],
        timeout_s=90, what="a commit",
    )  # fmt: skip
    kill(process.pid)
    process.communicate()
    wait_for(lambda: not living(run.run_dir), what="the children to die with their parent")
    assert ": cut off: its process is gone" in yatt("status", str(run.run_dir)).stdout
    cancelled = yatt("cancel", str(run.run_dir))
    assert cancelled.returncode == 2 and "is not running" in cancelled.stderr
    done = yatt("resume", str(run.run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from iteration" in done.stdout
    assert [row["training/global_step"] for row in rows(run.run_dir / "metrics.jsonl")] == list(range(1, 9))


def test_a_signal_stops_the_run_with_everything_saved(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"trainer": {"total_iterations": 100}, "checkpoint": {"save_every": 1000}})
    process = start("run", str(run.write()))
    wait_for(lambda: len(rows(run.run_dir / "metrics.jsonl")) >= 2, timeout_s=90, what="two iterations")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    assert "yatt resume" in output
    commits = [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "ckpt.commit"]
    assert len(commits) == 1, "what was trained was saved before the end"
    assert living(run.run_dir) == {}


def test_looking_at_a_run_whose_folder_is_private(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"model": REHEARSED, "trainer": {"total_iterations": 2}})
    finished(run)
    status = yatt("status", str(run.run_dir), "--json")
    assert status.returncode == 0
    summary = json.loads(status.stdout)
    assert (summary["state"], summary["iteration"], summary["committed"]) == ("finished", 2, 2)
    assert "iteration 2/2" in yatt("status", str(run.run_dir)).stdout
    assert "iteration 2/2" in yatt("watch", str(run.run_dir)).stdout
    assert "trainer-n0r0.1: " in yatt("logs", str(run.run_dir), "--role", "trainer", "-n", "100").stdout
    report = yatt("report", str(run.run_dir))
    assert report.returncode == 0, report.stderr
    assert not re.search("https?:", Path(report.stdout.strip()).read_text().replace("http://www.w3.org", ""))
    assert run.run_dir.stat().st_mode & 0o777 == 0o700
    secrets = list((run.run_dir / "keys").glob("*_secret"))
    assert len(secrets) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in secrets)


ASKS_THE_JUDGE = '''
async def compute_score(data_source, solution_str, ground_truth, extra_info, prompt, client):
    """Half a point for each of two opinions that is longer than two characters."""
    opinions = [await client.complete(prompt + solution_str) for _ in range(2)]
    return {"score": sum(len(text) > 2 for text in opinions) / 2, "first_length": len(opinions[0])}
'''


def test_several_judges_with_weights_one_of_them_a_python_function(tmp_path: Path) -> None:
    for name in ("strict", "asked"):
        folder = make_scripted_model(tmp_path / name, mean_tokens=4)
        (Path(folder) / "model.safetensors").write_bytes(b"")
    (tmp_path / "asks.py").write_text(ASKS_THE_JUDGE)
    common = {"engine": "scripted", "max_model_tokens": 128, "max_tokens": 8, "on_unparsable": "score"}
    run = RunFile(tmp_path, {
        "genrms": [
            {"name": "strict", "model": str(tmp_path / "strict"), "template": "{prompt}{completion}",
             "verdict": {"pattern": "([a-z])", "scores": {"e": 1.0}}, "weight": 2.0, **common},
            {"name": "asked", "model": str(tmp_path / "asked"), "path": str(tmp_path / "asks.py"),
             "weight": 0.5, **common},
        ],
        "model": REHEARSED,
        "trainer": {"total_iterations": 2},
    })  # fmt: skip
    written = finished(run)
    for row in written:
        parts = [row[f"critic/score/{name}/mean"] for name in ("digits", "strict", "asked")]
        expected = parts[0] + 2.0 * parts[1] + 0.5 * parts[2]
        assert row["critic/rewards/mean"] == pytest.approx(expected, abs=1e-6)
        assert row["genrm/asked/asked"] >= 32, "two opinions a completion"
    phases = [e["phase"] for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "phase.begin"]
    assert phases.count("score") == 4, "colocated: each judge has the GPUs in turn, each iteration"


RANKS = '''
def compute_score(prompts, completions, ground_truth, **columns):
    """Rank by length in the group; this needs all of it."""
    assert len(completions) == 4 and len(set(prompts)) == 1, (prompts, completions)
    return [sum(len(other) < len(mine) for other in completions) / 3 for mine in completions]
'''


def test_a_function_ranks_groups_and_judges_compare_them_one_behind_a_url(tmp_path: Path) -> None:
    folder = make_scripted_model(tmp_path / "judge", mean_tokens=4)
    (Path(folder) / "model.safetensors").write_bytes(b"")
    (tmp_path / "ranks.py").write_text(RANKS)
    service = Service(lambda number: (503, {}, b"") if number % 9 == 0 else says(f"[[{'AB'[number % 2]}]]"))
    pair = {
        "judging": {"by": "pairwise", "pairs": "circular"},
        "template": "{prompt}|{completion_a}|{completion_b}",
        "on_unparsable": "score", "unparsable_score": 0.5,
    }  # fmt: skip
    run = RunFile(tmp_path, {
        "run": {"deterministic": False},
        "rewards": [{"name": "rank", "path": str(tmp_path / "ranks.py"), "style": "trl"}],
        "genrms": [
            {"name": "near", "model": folder, "engine": "scripted", "max_model_tokens": 128, "max_tokens": 8,
             **pair, "verdict": {"pattern": "([a-z])", "scores": {"e": 1.0, "t": 0.0}}},
            {"name": "far", "model": "big", "api": {"url": service.url, "retries": 3},
             **pair, "verdict": {"pattern": "\\[\\[([AB])\\]\\]", "scores": {"A": 1.0, "B": 0.0}}},
        ],
        "model": REHEARSED,
        "trainer": {"total_iterations": 2},
    })  # fmt: skip
    try:
        written = finished(run)
    finally:
        service.close()
    for row in written:
        assert row["genrm/near/asked"] >= 32 and row["genrm/far/asked"] >= 32, "4 groups x 4 pairs x 2 orders"
        for name in ("rank", "near", "far"):
            assert 0 <= row[f"critic/score/{name}/mean"] <= 1
    assert len(service.got) > 64 and {body["model"] for _, body, _ in service.got} == {"big"}
    workers = {e["worker"] for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "worker.start"}
    assert any("genrm-near" in name for name in workers) and not any("far" in name for name in workers)


def test_a_judges_service_that_is_down_for_a_while_costs_time_and_no_group(tmp_path: Path) -> None:
    """Longer than the retries of each question; `yatt status` says so meanwhile."""
    is_back = threading.Event()

    def answer(_: int) -> tuple[int, dict[str, str], bytes]:
        return says("score: 7") if is_back.is_set() else (503, {}, b"maintenance")

    service = Service(answer)
    far = {"name": "far", "model": "big", "api": {"url": service.url, "retries": 1},
           "template": "{completion}", "verdict": {"pattern": "score: ([0-9])"}}  # fmt: skip
    run = RunFile(
        tmp_path,
        {
            "run": {"deterministic": False},
            "model": REHEARSED,
            "genrms": [far],
            "trainer": {"total_iterations": 2},
        },
    )
    shown = "GenRM 'far' (node 0): HTTP 503"
    try:
        with start("run", str(run.write())) as process:
            wait_for(lambda: shown in yatt("status", str(run.run_dir)).stdout, timeout_s=60, what="status")
            is_back.set()
            assert process.communicate(timeout=300)[0] is not None and process.returncode == 0
    finally:
        service.close()
    events = rows(run.run_dir / "events.jsonl")
    waits = [(event["node"], bool(event["error"])) for event in events if event["kind"] == "judge.wait"]
    assert sorted(waits) == sorted({(node, is_down) for node, _ in waits for is_down in (True, False)})
    assert not [event for event in events if event["kind"] == "rollout.group.drop"]
    assert "waits" not in yatt("status", str(run.run_dir)).stdout
