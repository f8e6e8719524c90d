"""The check after each weight update: correct bfloat16 runs pass, other weights do not."""

from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunFile, rows, yatt
from tests.tiny_models import VOCAB_SIZE, make_qwen3
from yatt.core.gpus.weight_check import ROUNDINGS_ALLOWED, row_differences
from yatt.records.message import pack_floats

ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {},
    "vllm": {"kv_cache_bytes": 32 << 20, "enforce_eager": True},
}
PROBE = [7 * i % (VOCAB_SIZE - 10) + 5 for i in range(48)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_deep_random_model_in_bfloat16_is_in_sync_and_another_is_not(tmp_path: Path, engine: str) -> None:
    """Its log-probs differ by more than 0.1 between correct programs; bits that can be read agree."""
    policy = make_qwen3(tmp_path / "policy", tied=False, layers=8, head=0.5)
    run = RunFile(tmp_path, {
        "launch": {"nodes": 1},
        "model": {"dtype": "bfloat16"},
        "rollout": {"engine": engine, **ENGINES[engine]},
        "trainer": {"total_iterations": 2},
        "sync": {"probe_prompts": 2},
    })  # fmt: skip
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [event for event in rows(run.run_dir / "events.jsonl") if event["kind"] == "weights.check"]
    assert {check["policy_version"] for check in checks} == {0, 1, 2}
    for check in checks:  # all tensors the first time, then a sixteenth of them each time
        assert check["num_compared"] >= (0 if check["policy_version"] else 2 * 8 + 2)
    assert all(0 < check["difference"] < 2 / ROUNDINGS_ALLOWED * check["allowed"] for check in checks)
    other = make_qwen3(tmp_path / "other", tied=False, layers=8, head=0.5, seed=1)
    rowed = [(pack_floats(logprobs(folder)),) for folder in (policy, other)]
    assert max(row_differences(*rowed)) > 5 * max(check["allowed"] for check in checks)


@pytest.mark.slow
def test_a_policy_learns_from_an_engine_in_fp8_that_has_two_options(tmp_path: Path) -> None:
    """Its weights are quantised anew at each update; the check follows what the first one has shown.
    A whole run, because vLLM's update, the trainer's log-probs and the correction meet nowhere else."""
    make_qwen3(tmp_path / "policy", tied=False, layers=4, head=0.5)
    options = {"quantization": "fp8_per_channel", "max_num_batched_tokens": 512}
    run = RunFile(tmp_path, {
        "run": {"deterministic": False},
        "launch": {"nodes": 1},
        "model": {"dtype": "bfloat16"},
        "rollout": {"engine": "vllm", **ENGINES["vllm"], "engine_args": options},
        "trainer": {"total_iterations": 3},
        "sync": {"probe_prompts": 2},
    })  # fmt: skip
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [event for event in rows(run.run_dir / "events.jsonl") if event["kind"] == "weights.check"]
    assert {check["policy_version"] for check in checks} == {0, 1, 2, 3}
    assert all(0.1 < check["difference"] <= check["allowed"] for check in checks), "in bfloat16 about 0.05"
    differences = [row["training/rollout_probs_diff_mean"] for row in rows(run.run_dir / "metrics.jsonl")]
    assert all(0.01 < difference < 0.1 for difference in differences), "in bfloat16 about 0.005"


def logprobs(folder: str) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows_TV = model(torch.tensor([PROBE])).logits[0, :-1].log_softmax(-1)
    return rows_TV.gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0].tolist()
