"""Settings of a model folder's picture processor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yatt.errors import ConfigError
from yatt.models.config_types import refused_model
from yatt.models.folder import CONFIG, decoder_config
from yatt.plain_files import read_json_object

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MOST_NUMBER = 1 << 40


def read_processor(folder: Path, key: str = "patch_size") -> tuple[Path, dict[str, Any]]:
    """Returns the settings of pictures and their file.

    Args:
        key: one that they have.

    Raises:
        ConfigError: there are none.
        OSError: a transient error.
    """
    for name in PROCESSOR_FILES:
        found = read_json_object(folder / name)
        settings = found.get("image_processor", found) if found else None
        if isinstance(settings, dict) and key in settings:
            return folder / name, settings
    raise refused_model(
        f"{folder} takes pictures, but has no {' or '.join(PROCESSOR_FILES)} with a {key}; copy the model's "
        "folder with its processor."
    )


def whole_number(values: dict[str, Any], key: str, file: Path, least: int = 1) -> int:
    """Returns a whole number of a file.

    Raises:
        ConfigError: it is missing, or none.
    """
    value = values.get(key)
    if type(value) is not int or not least <= value < MOST_NUMBER:
        raise ConfigError(f"{file}: {key} is missing, or no whole number of {least} or more.")
    return value


def refuse_beyond(folder: Path, config: dict[str, Any], ids: Mapping[str, int]) -> None:
    """Refuses tokens that the vocabulary does not have.

    Args:
        config: content of the folder's config.json.
        ids: of tokens, by what messages call them.

    Raises:
        ConfigError: there is one.
    """
    vocabulary = decoder_config(config).get("vocab_size")
    for name, number in ids.items():
        if isinstance(vocabulary, int) and number >= vocabulary:
            raise ConfigError(
                f"{folder / CONFIG}: {name} is {number}, beyond the {vocabulary} tokens of vocab_size."
            )
