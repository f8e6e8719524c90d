"""A Hugging Face folder: its model, and the files beside its weights."""

from dataclasses import dataclass
from pathlib import Path

from yatt.models.model import Model

CONFIG = "config.json"
SIDE_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Config, tokenizer and processor; an exported policy has copies of those that its model's folder has."""

INDEX = "model.safetensors.index.json"
"""Maps tensors to files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A Hugging Face folder whose config.json was read."""

    path: Path
    model: Model
