"""The file of `yatt sft`: supervised training, to make a small model or to warm one up."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModel:
    """A model made here: sizes of a Hugging Face config, weights drawn from the seed, and a tokenizer with
    one token a character."""

    model_type: str = "qwen3"
    """qwen3, qwen2 or llama."""

    characters: str = ""
    """The vocabulary. The last character ends a completion."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 64
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    """Standard deviation of the drawn weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftValidation:
    """Training stops once enough sampled completions equal the reference."""

    file: str = ""
    """JSONL with prompt and completion. Empty: train all steps."""

    every: int = 25
    """Steps between tries."""

    stop_at: float = 1.0
    """Share of exact completions at which training stops."""

    temperature: float = 1.0
    max_prompts: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """One SFT file."""

    output: str
    """Hugging Face folder to write. Training is skipped when it was made by the same file and data."""

    train_file: str
    """JSONL with prompt and completion."""

    start: str = ""
    """Hugging Face folder to go on from; empty: `new`."""

    new: NewModel = field(default_factory=NewModel)
    validation: SftValidation = field(default_factory=SftValidation)
    batch_size: int = 256
    max_steps: int
    lr: float
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    seed: int = 0
    threads: int = 2


def sft_rules(config: SftConfig) -> Iterator[tuple[str, str]]:
    """What is wrong between keys."""
    if not config.start and len(set(config.new.characters)) < 2:
        yield "new.characters", "a model without `start` needs its vocabulary: write the characters."
    if len(set(config.new.characters)) != len(config.new.characters):
        yield "new.characters", "a character stands twice; write each once."
    for key, path in (("train_file", config.train_file), ("validation.file", config.validation.file)):
        if path and not Path(path).is_file():
            yield key, f"there is no file {path}."
