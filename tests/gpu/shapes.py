"""Model shapes for figures on a GPU; the `toy` one runs on any CPU.

python -m tests.gpu.shapes SHAPE FOLDER     makes a model in a process of its own
"""

import os
import shutil
import subprocess
import sys
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
    "qwen3-8b, 8 layers": Shape(4096, 12288, 8, 32, 8, 128, 151936, tied=False),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, 151936, tied=True),
}


def make_model(shape: Shape, folder: Path) -> None:
    """Makes a folder as Hugging Face's, with a tokenizer of a few words and random weights; whole or absent.

    It uses the GPU: never call it in a process that starts a run or an engine.
    """
    import torch
    import transformers

    from tests.tiny_models import make_tokenizer

    partial = folder.with_name(f"{folder.name}.partial")
    make_tokenizer(partial)
    torch.manual_seed(0)
    dtype = torch.bfloat16
    config = transformers.Qwen3Config(**shape.sizes(), dtype="bfloat16")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(partial)
    os.replace(partial, folder)


def device_name() -> str:
    """The first GPU's name by the driver, without a CUDA context; cpu where there is none."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    argv = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    return said.partition("\n")[0].strip() or "cpu"


def peak_tflops() -> float:
    """Of this device in bfloat16; 0 where it is not known."""
    name = device_name()
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), 0.0)


if __name__ == "__main__":
    make_model(SHAPES[sys.argv[1]], Path(sys.argv[2]))
    print("ROW {}")
