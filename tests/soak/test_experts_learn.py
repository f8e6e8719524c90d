"""A mixture of experts over two ranks learns the quickstart's sums from verdicts (a quarter of an hour).

The quickstart's dense policy becomes the mixture: each expert is a copy of its feed-forward part, moved a
little, so that the start is known and experts can become different (sparse upcycling, arXiv:2212.05055).
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.bench.learning import ACCURACY, make_models
from tests.runs import ROOT, rows, yatt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * 3600)]
NUM_EXPERTS, NUM_CHOSEN, NOISE, ITERATIONS = 4, 2, 0.01, 80
MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOSEN, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


def upcycled(dense: Path, folder: Path) -> str:
    """Writes the mixture. Weights of chosen experts add up to 1, so it computes what the dense one does."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(dense, folder)
    config = json.loads((dense / "config.json").read_text())
    moe = {**config, **MOE, "moe_intermediate_size": config["intermediate_size"]}
    (folder / "config.json").write_text(json.dumps(moe))
    chance = torch.Generator().manual_seed(0)
    weights = {
        name: tensor for file in dense.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    for name in [name for name in weights if ".mlp." in name]:
        layer, leaf = name.split(".mlp.")
        tensor = weights.pop(name)
        for expert in range(NUM_EXPERTS):
            noise = 1 + NOISE * torch.randn(tensor.shape, generator=chance)
            weights[f"{layer}.mlp.experts.{expert}.{leaf}"] = tensor * noise
        gate = f"{layer}.mlp.gate.weight"
        weights[gate] = torch.randn(NUM_EXPERTS, config["hidden_size"], generator=chance) * 0.08
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.skipif(not os.environ.get("YATT_LEARNING"), reason="a quarter of an hour; make soak runs it")
def test_experts_over_two_ranks_learn_from_verdicts(tmp_path: Path) -> None:
    make_models()
    policy = upcycled(ROOT / "runs/quickstart/policy", tmp_path / "policy")
    done = yatt(
        "run", "configs/quickstart.yaml", f"run.dir={tmp_path}/run", f"model.path={policy}",
        f"trainer.total_iterations={ITERATIONS}", f"validation.every={ITERATIONS}",
        "trainer.expert_model_parallel_size=2", "trainer.router_replay=true", "sync.probe_prompts=2",
        timeout_s=1200, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    written = rows(tmp_path / "run/metrics.jsonl")
    accuracies = [row[ACCURACY] for row in written if ACCURACY in row]
    assert accuracies[-1] - accuracies[0] > 0.1, accuracies
    assert all(0 <= row["moe/idle_experts"] < 1 for row in written if "moe/idle_experts" in row)
