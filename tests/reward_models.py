"""Tiny scalar reward models: folders of transformers' ...ForSequenceClassification."""

import random
from pathlib import Path
from typing import Any

from tests.tiny_models import VOCAB_SIZE, make_tokenizer

SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "eos_token_id": 2,
}  # fmt: skip
LIKED = 160
"""Tokens from this one on are those that a trained model likes."""


def make_reward_model(folder: Path, *, labels: int = 1, steps: int = 0) -> str:
    """A random Qwen3 with a head of `labels` numbers, whose padding token is also the end of a text. With
    `steps` it is trained to prefer a text with more liked tokens (Bradley-Terry)."""
    import torch
    import transformers

    make_tokenizer(folder)
    config = transformers.Qwen3Config(**SIZES, num_labels=labels, pad_token_id=2)
    model = transformers.Qwen3ForSequenceClassification(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(torch.ones_like(parameter) if "norm" in name else noise)
    if steps:
        _train(model, steps)
    model.save_pretrained(folder)
    return str(folder)


def _train(model: Any, steps: int) -> None:
    import torch

    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        better, worse = _texts(draw, 0.8), _texts(draw, 0.2)
        margin = model(better).logits[:, 0] - model(worse).logits[:, 0]
        loss = -torch.nn.functional.logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _texts(draw: random.Random, share: float) -> Any:
    """Texts of 24 tokens, of which about this share are liked."""
    import torch

    return torch.tensor(
        [
            [
                draw.randrange(LIKED, VOCAB_SIZE) if draw.random() < share else draw.randrange(3, LIKED)
                for _ in range(24)
            ]
            for _ in range(16)
        ]
    )


def expected_values(folder: str, texts: list[list[int]]) -> list[list[float]]:
    """The numbers of the head for each text by itself, in float32, of its last token."""
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0].tolist() for ids in texts]
