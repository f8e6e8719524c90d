"""Model shapes and samples for figures on a GPU; `toy` ones run on any CPU, to show that the scripts do."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Dense bfloat16, without sparsity, by the vendor's data sheets."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3 in sizes; weights are random."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    def sizes(self) -> dict:
        return {
            "hidden_size": self.hidden, "intermediate_size": self.mlp, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocab, "tie_word_embeddings": self.tied,
            "max_position_embeddings": 40960, "rope_theta": 1e6, "eos_token_id": 2,
        }  # fmt: skip

    def num_parameters(self) -> int:
        """Of what every token is multiplied with: without the embedding's table, with the output layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + self.hidden * self.vocab

    def flops(self, lengths: list[int], *, steps: int = 3) -> float:
        """Of a forward and backward pass (`steps` 3) or a forward alone (1); causal attention counted half.

        Source: Narayanan et al. 2021 (arXiv 2104.04473), eq. 3, for these layers, without recomputation.
        """
        attention = 2 * self.layers * self.heads * self.head_dim * sum(n * n for n in lengths)
        return steps * (2 * self.num_parameters() * sum(lengths) + attention)


SHAPES = {
    "toy": Shape(64, 128, 2, 4, 2, 32, 320, tied=True),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 128, 151936, tied=True),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, 151936, tied=True),
}


def make_model(shape: Shape, folder: Path, dtype: str = "bfloat16") -> Path:
    """A folder as Hugging Face's, with a tokenizer of a few words and random weights."""
    import torch
    import transformers

    from tests.tiny_models import make_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**shape.sizes(), dtype=dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


def arguments(text: str, *, shapes: str = "qwen3-1.7b") -> argparse.Namespace:
    """What every script here takes."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--toy", action="store_true", help="smallest sizes, on whatever device there is")
    parser.add_argument("--shapes", nargs="+", default=shapes.split(), choices=sorted(SHAPES))
    parser.add_argument("--out", type=Path, help="folder for the figures, as JSON")
    given = parser.parse_args()
    if given.toy:
        given.shapes = ["toy"]
    return given


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def peak_tflops() -> float:
    """Of this device in bfloat16; 0 where it is not known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name()), 0.0)


def show(name: str, rows: list[dict], out: Path | None) -> None:
    """Print figures, and keep them."""
    for row in rows:
        print(name, json.dumps(row), flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        partial = out / f".{name}.json"
        partial.write_text(json.dumps({"device": device_name(), "rows": rows}, indent=1))
        os.replace(partial, out / f"{name}.json")
