"""Supervised training from nothing, in a process of its own: megatron's state is a process's."""

import json
import subprocess
import sys

import pytest

from tests.integration.trainer.conftest import child_environment

PROGRAM = """
import json, sys
from pathlib import Path
import torch, transformers
from yatt.trainer.sft import SftSettings, train_sft
from yatt.trainer.sft_rows import Example

folder = Path(sys.argv[1])
config = transformers.Qwen3Config(
    vocab_size=12, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=32, tie_word_embeddings=True,
)

def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(0, 10, (32, 3), generator=generator).tolist()
        yield [Example([11, *row, 10], row[::-1]) for row in rows]

prompts = [[11, 1, 2, 3, 10], [11, 9, 0, 5, 10]]
seen = []

def stop(step, loss, student):
    if step % 50 == 0:
        seen.append(student.complete([Example(ids, []) for ids in prompts], 3, temperature=0.0))
    return step == 150

settings = SftSettings(max_steps=500, lr=3e-3, warmup_steps=20, threads=1)
first = train_sft(config, batches(0), folder / "first", settings, stop)
model = transformers.AutoModelForCausalLM.from_pretrained(folder / "first").float().eval()
ids = torch.tensor(prompts)
for _ in range(3):
    ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
greedy = ids[:, 5:].tolist()
second = train_sft(folder / "first", batches(1), folder / "second", settings, lambda step, *_: step == 3)
print(json.dumps({"steps": first.num_steps, "loss": first.loss, "seen": seen, "greedy": greedy,
                  "second": second.loss, "files": sorted(p.name for p in (folder / "second").iterdir())}))
"""


@pytest.mark.slow
def test_a_model_made_from_nothing_learns_to_reverse_and_goes_on_from_its_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["steps"] == 150
    assert seen["loss"] < 0.3
    assert seen["seen"][-1] == seen["greedy"] == [[3, 2, 1], [5, 0, 9]]
    assert seen["second"] < 0.3
    assert {"config.json", "model-00001.safetensors", "model.safetensors.index.json"} <= set(seen["files"])
