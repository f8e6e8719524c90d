"""A Hugging Face folder: its model, and the files beside its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.models.model import Model
from yatt.plain_files import read_json_object

CONFIG = "config.json"
SIDE_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
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


def decoder_config(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a config.json that describes the decoder: of a model that takes pictures
    `text_config`, in files that have it."""
    inner = values.get("text_config")
    return inner if isinstance(inner, dict) else values


def missing_config(folder: str) -> str:
    """Returns the path of a folder's config.json if it is not there; else an empty text."""
    path = Path(folder) / CONFIG
    return "" if path.is_file() else str(path)


def takes_pictures(folder: str) -> bool:
    """Whether the model in a Hugging Face folder takes pictures; False if its config.json cannot be read.

    Raises:
        ConfigError: config.json is no JSON object.
        OSError: a transient error.
    """
    return isinstance((read_json_object(Path(folder) / CONFIG) or {}).get("vision_config"), dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A Hugging Face folder whose config.json was read."""

    path: Path
    model: Model
