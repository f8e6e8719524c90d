"""Tiny models, and worlds of real trainer processes."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainer.program import VOCAB
from tests.runs import ROOT, environment, popen
from tests.tiny_models import CLASSES_OF, name_kind

PROGRAM = Path(__file__).with_name("program.py")
TIMEOUT_S = 600


def make_model(folder: Path, kind: str, *, is_tied: bool, **values_of_its_own: object) -> Path:
    """A random Hugging Face model with norms and biases that are not trivial."""
    import transformers

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": is_tied,
        **({"head_dim": 16} if kind.startswith(("qwen3", "glm4")) else {}),
        **values_of_its_own,
    }
    if isinstance(kinds := sizes.get("layer_types"), list):
        sizes["layer_types"] = kinds[: sizes["num_hidden_layers"]]
    config = transformers.AutoConfig.for_model(CLASSES_OF.get(kind, kind), **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.1 if parameter.dim() == 1 else 0.05
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        spread_norms(model)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    name_kind(folder, kind)
    return folder


def spread_norms(model: Any) -> None:
    """Norms over all heads get weights far from 1, which differ by head."""
    size = getattr(model.config, "head_dim", None)
    size = size or model.config.hidden_size // model.config.num_attention_heads
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")) and len(weight) > size:
            weight.mul_(torch.linspace(0.3, 1.5, len(weight) // size).repeat_interleave(size))


@pytest.fixture(scope="session")
def shallow(tmp_path_factory):
    """As `models`, with two layers: for what does not depend on the depth."""
    root = tmp_path_factory.mktemp("shallow")
    return {"qwen3": make_model(root / "qwen3", "qwen3", is_tied=False, num_hidden_layers=2)}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of each architecture; Qwen2's embeddings are tied."""
    root = tmp_path_factory.mktemp("models")
    return {
        kind: make_model(root / kind, kind, is_tied=kind == "qwen2") for kind in ("llama", "qwen2", "qwen3")
    }


@dataclass(frozen=True)
class Job:
    """What a job left behind."""

    folder: Path
    notes: list[dict]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / f"{name}.published")

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / f"{name}.safetensors")


def child_environment() -> dict[str, str]:
    """One thread, nothing compiled, nothing fetched."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def run_world(
    folder: Path, world_size: int, jobs: list[dict], timeout_s: float = TIMEOUT_S, program: Path = PROGRAM
) -> dict[str, Job]:
    """Run jobs in `world_size` processes; every process started is waited for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    logs = [(folder / f"log-{rank}").open("w") for rank in range(world_size)]
    module = ".".join(program.relative_to(ROOT).with_suffix("").parts)
    words = [[str(folder), str(rank), str(world_size)] for rank in range(world_size)]
    processes = [
        popen([sys.executable, "-P", "-m", module, *each], env=environment(), stdout=log, stderr=log)
        for each, log in zip(words, logs, strict=True)
    ]
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    tails = "\n".join((folder / f"log-{rank}").read_text()[-3000:] for rank in range(world_size))
    assert codes == [0] * world_size, tails
    return {job["name"]: _job(folder / job["name"], world_size) for job in jobs}


def _job(folder: Path, world_size: int) -> Job:
    return Job(folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)])
