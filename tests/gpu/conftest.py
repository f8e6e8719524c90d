"""GPU tests: skipped with a sentence where there is no CUDA device. `tools/gpu_check.sh` runs them."""

from pathlib import Path

import pytest

DEVICE = "cuda"


@pytest.fixture(scope="session", autouse=True)
def cuda():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here; run tools/gpu_check.sh on a machine with one")
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A random Qwen3 of some 60 M parameters: large enough for its memory to be told from noise."""
    import torch
    import transformers

    from tests.tiny_models import VOCAB_SIZE, make_tokenizer

    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=768, intermediate_size=2304, num_hidden_layers=8,
        num_attention_heads=12, num_key_value_heads=4, head_dim=64, max_position_embeddings=512,
        tie_word_embeddings=False, eos_token_id=2,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def say(capsys):
    """Prints a figure whether or not pytest captures."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}")

    return show
