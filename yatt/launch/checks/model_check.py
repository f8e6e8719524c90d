"""Checks of model folders before anything starts, for policies and judges."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yatt.adapters.inputs.tensor_header import TensorPlace, read_header
from yatt.errors import ConfigError
from yatt.launch.resolve.completed import model_limit
from yatt.models.config_types import type_fault
from yatt.models.folder import CONFIG, INDEX, missing_config
from yatt.plain_files import read_json_object

HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")


def check_model(folder: str, key: str, *, has_weights: bool = True) -> dict[str, object]:
    """Returns the folder's config.json.

    Args:
        has_weights: an engine or a trainer reads them; a scripted one does not.

    Raises:
        ConfigError: the folder is not a Hugging Face model.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(
            f"there is no folder {folder}. Write the path of a Hugging Face model on this "
            f"machine.{_fetching(root)}",
            key=key,
            missing=folder,
        )
    found = _config_of(folder, key)
    if found is None:
        says = f"{folder} has no config.json; name a Hugging Face model folder."
        raise ConfigError(says, key=key, missing=folder)
    if fault := type_fault(found, needs_type=has_weights):
        raise ConfigError(f"{root / CONFIG} {fault}.", key=key)
    if not any(root.glob("*.safetensors")):
        says = f"{folder} has no *.safetensors; save the model with save_pretrained."
        raise ConfigError(says, key=key, missing=folder)
    return found


def _fetching(root: Path) -> str:
    """How to get a model, if the path is a name of the hub after a folder that exists."""
    name = "/".join(root.parts[-2:])
    before = root.parent.parent
    is_name = HUB_NAME.fullmatch(name) and not root.parent.exists() and before.is_dir() and before.name
    command = shlex.join(["hf", "download", name, "--local-dir", str(root)])
    return f" A model of the hub is fetched by: {command}" if is_name else ""


def _config_of(folder: str, key: str) -> dict[str, Any] | None:
    try:
        return read_json_object(Path(folder) / CONFIG)
    except ConfigError as error:
        raise error.about(key) from error.__cause__


def check_length(folder: str, key: str, num_tokens: int) -> None:
    """Checks that the model's context length is at least `num_tokens`.

    Raises:
        ConfigError: it is shorter.
    """
    limit = model_limit(folder)
    if num_tokens == 0:
        raise ConfigError(
            f"{folder}/config.json has no max_position_embeddings; write the context length here.",
            key=key,
            missing=missing_config(folder),
        )
    if limit and num_tokens > limit:
        says = f"is {num_tokens}, but {folder} takes {limit} tokens at most."
        raise ConfigError(says, key=key, has_colon=False)


def checked_tensors(folder: str, key: str) -> tuple[dict[str, TensorPlace], list[str]]:
    """Returns the tensors of all files by name, and what is wrong with the files.

    Raises:
        ConfigError: a file is not a safetensors file; its cause is the filesystem's error, if there is one.
    """
    places: dict[str, TensorPlace] = {}
    faults, file_of = [], dict[str, str]()
    for path in sorted(Path(folder).glob("*.safetensors")):
        if not path.is_file():
            faults.append(f"has {path.name}, which is no file or a link to none; copy it again")
            continue
        found = _header(path, key)
        if twice := sorted(found.keys() & places.keys()):
            faults.append(
                f"has {twice[0]} in {file_of[twice[0]]} and in {path.name}; remove the file that is wrong"
            )
        places |= found
        file_of |= dict.fromkeys(found, path.name)
    return places, faults + list(_index_faults(Path(folder), file_of, key))


def _header(path: Path, key: str) -> dict[str, TensorPlace]:
    try:
        return read_header(path)
    except ConfigError as error:
        raise error.about(key) from error.__cause__
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.", key=key) from error


def _index_faults(root: Path, file_of: dict[str, str], key: str) -> Iterator[str]:
    """What is wrong with the index, which engines read to find the files."""
    try:
        index = read_json_object(root / INDEX)
    except ConfigError as error:
        raise ConfigError(f"{root} has an index that cannot be used: {error}", key=key) from error
    if index is None:
        return
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        yield f"has a {INDEX} without weight_map from tensors to files; copy it again"
        return
    for name, file in weight_map.items():
        if file_of.get(name) != file:
            found = f"it is in {file_of[name]}" if name in file_of else "no file has it"
            yield f"has a {INDEX} that promises {name} in {file}, but {found}; copy the folder again"
            return
    if left := sorted(file_of.keys() - weight_map.keys()):
        yield f"has a {INDEX} that does not name {left[0]} of {file_of[left[0]]}; copy the folder again"
