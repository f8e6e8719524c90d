"""The file of `yatt sft`: supervised fine-tuning, to create a small model or to warm one up."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from yatt.config.sections.media import MediaSection, VisionSection
from yatt.config.sections.ranges import (
    COUNT,
    COUNT_OR_NONE,
    FILE,
    FREE,
    LINE,
    SEED,
    at_least,
    range_above,
    range_between,
)
from yatt.errors import Finding, mistake_in


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModel:
    """A new model: sizes of a Hugging Face config, weights drawn from the seed, and a tokenizer with one
    token per character."""

    model_type: Annotated[str, LINE] = "qwen3"
    """qwen3, qwen2 or llama."""

    characters: Annotated[str, FREE] = ""
    """The vocabulary. The last character ends a completion."""

    hidden_size: Annotated[int, COUNT] = 128
    """Width of the residual stream."""

    intermediate_size: Annotated[int, COUNT] = 384
    """Width of the feed-forward layers."""

    num_hidden_layers: Annotated[int, COUNT] = 3
    """Number of layers."""

    num_attention_heads: Annotated[int, COUNT] = 4
    """Query heads."""

    num_key_value_heads: Annotated[int, COUNT] = 4
    """Key and value heads."""

    head_dim: Annotated[int, COUNT] = 32
    """Width of one head."""

    max_position_embeddings: Annotated[int, COUNT] = 64
    """Longest sequence."""

    rope_theta: Annotated[float, range_above(0, most=1e12)] = 10000.0
    """Base of the rotary embedding."""

    tie_word_embeddings: bool = True
    """Use the input embedding as output layer."""

    initializer_range: Annotated[float, range_between(0, 1)] = 0.02
    """Standard deviation of the drawn weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftValidation:
    """Validation: training stops once enough sampled completions equal the reference."""

    file: Annotated[str, FILE] = ""
    """JSONL with prompt and completion. Empty: train all steps."""

    every: Annotated[int, COUNT] = 25
    """Optimizer steps between validations."""

    stop_at: Annotated[float, range_between(0, 1)] = 1.0
    """Fraction of exact completions at which training stops."""

    temperature: Annotated[float, range_between(0, 100)] = 1.0
    """Sampling temperature; 0 is greedy."""

    max_prompts: Annotated[int, COUNT] = 256
    """Maximum number of prompts that are scored."""


VIDEOS = "videos"
"""Column of a prompt's videos."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """One SFT file."""

    output: Annotated[str, FILE]
    """Hugging Face folder to write. Training is skipped if it was made from the same file and data."""

    train_file: Annotated[str, FILE]
    """JSONL or parquet. A row has `prompt` and `completion` as text or chat messages, or `messages`, the last
    of them the assistant's."""

    image_key: Annotated[str, LINE] = "images"
    """Column of a prompt's pictures, as `data.image_key` of a run, if `start` takes pictures. Videos are in
    the column `videos`."""

    media_root: Annotated[str, FILE] = ""
    """Folder of the files that rows name."""

    media_store: Annotated[str, FILE] = ""
    """Folder of the pictures whose bytes were in data files; filled in. Empty: there are no pictures."""

    media: MediaSection = field(default_factory=MediaSection)
    vision: VisionSection = field(default_factory=VisionSection)
    start: Annotated[str, FILE] = ""
    """Hugging Face folder to start from; empty: make the model of `new`."""

    new: NewModel = field(default_factory=NewModel)
    validation: SftValidation = field(default_factory=SftValidation)
    batch_size: Annotated[int, COUNT] = 256
    """Texts per optimizer step."""

    max_steps: Annotated[int, COUNT]
    """Maximum number of optimizer steps."""

    lr: Annotated[float, range_between(0, 1)]
    """Peak learning rate."""

    warmup_steps: Annotated[int, COUNT_OR_NONE] = 50
    """Optimizer steps of linear warm-up."""

    weight_decay: Annotated[float, at_least(0)] = 0.01
    """Decoupled weight decay (AdamW)."""

    clip_grad: Annotated[float, at_least(0)] = 1.0
    """Gradients are clipped to this norm; 0 does not clip."""

    seed: Annotated[int, SEED] = 0
    """Initial weights and the order of the data are drawn from it."""

    threads: Annotated[int, range_between(1, 65536)] = 2
    """CPU threads."""

    @property
    def prepared_folder(self) -> Path | None:
        """The folder of prepared pictures, on disk beside `media_store`; None if there are no pictures."""
        return Path(self.media_store).with_name("prepared") if self.media_store else None


def sft_rules(config: SftConfig) -> Iterator[Finding]:
    """Yields every mistake between keys."""
    if not config.start and len(set(config.new.characters)) < 2:
        yield mistake_in(
            "new.characters", "without `start`, the new model needs a vocabulary: write its characters."
        )
    new = config.new
    if not config.start and new.num_attention_heads % new.num_key_value_heads:
        yield mistake_in(
            "new.num_key_value_heads",
            f"{new.num_key_value_heads} does not divide num_attention_heads {new.num_attention_heads}; write "
            "a divisor.",
        )
    if not config.start and new.head_dim % 2:
        yield mistake_in(
            "new.head_dim", f"{new.head_dim} is odd, but rotary positions need pairs; write an even number."
        )
    if len(set(config.new.characters)) != len(config.new.characters):
        yield mistake_in("new.characters", "a character is written twice; write each one once.")
    for key, path in (("train_file", config.train_file), ("validation.file", config.validation.file)):
        if path and not Path(path).is_file():
            yield mistake_in(key, f"there is no file {path}; correct the path.")
