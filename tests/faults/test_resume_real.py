"""As test_resume_exact, with real vLLM engines for policy and judge: killed again and again; bit-equal.

The policy has latent attention, and experts that are spread over the ranks; a critic of another
architecture learns beside it, both optimizers in host memory.

The undisturbed run starts its workers by exec, and the other one forks them; in that one policy and critic
take turns.
"""

import os
from pathlib import Path

import pytest

from tests.faults.test_resume_exact import final_state, finish_under_fire, metrics
from tests.runs import RunFile, yatt
from tests.tiny_models import make_qwen3, make_sigmoid_moe

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_KILLS = 3 if int(os.environ.get("YATT_KILLS", "3")) <= 3 else 6

LAYOUT = {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1, "router_replay": True,
}  # fmt: skip


def settings(folder: Path) -> dict:
    judge = make_qwen3(folder / "judge", tied=False, seed=1)
    section = {"name": "judge", "model": judge, "dtype": "float32", "template": "{prompt}{completion}",
               "verdict": {"pattern": "([a-m])", "scores": {"a": 1.0, "b": 0.5}}, "max_tokens": 6,
               "temperature": 1.0, "on_unparsable": "score", "kv_cache_bytes": 32 << 20,
               "enforce_eager": True}  # fmt: skip
    return {
        "run": {"max_attempts_without_progress": 20},
        "rollout": {"engine": "vllm", "kv_cache_bytes": 32 << 20, "enforce_eager": True},
        "genrms": [section],
        "placement": {"mode": "partial", "genrm_gpu_sets": 1},
        "algorithm": {"adv_estimator": "gae", "lam": 0.95},
        "critic": {
            "path": make_qwen3(folder / "critic", tied=False, seed=5, experts=4),
            "warmup_iterations": 2,
            "optimizer": {"lr": 1.0e-3},
        },
        "trainer": {"total_iterations": 6 * NUM_KILLS, "offload_optimizer": True, **LAYOUT},
        "sync": {"probe_prompts": 2},
    }


def test_real_engines_that_are_killed_change_nothing(tmp_path: Path) -> None:
    """A whole run: states of vLLM and of ranks that share experts, in one policy."""
    runs = []
    for name, launch in (("calm", {"nurseries": False}), ("disturbed", {})):
        found = settings(tmp_path) | {"launch": launch}
        found["critic"]["swap"] = name == "disturbed"
        run = RunFile(tmp_path / name, found)
        make_sigmoid_moe(run.folder / "policy", "deepseek_v3", seed=4)
        runs.append(run)
    calm, disturbed = runs
    done = yatt("run", str(calm.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    hits = finish_under_fire(disturbed, NUM_KILLS, seed=3, settle_s=(3.0, 6.5))
    assert len(hits) >= NUM_KILLS, f"only {hits}"
    assert metrics(disturbed) == metrics(calm)
    assert all("critic/vf_loss" in row for row in metrics(calm))
    assert final_state(disturbed) == final_state(calm)
