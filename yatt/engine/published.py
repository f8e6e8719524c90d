"""The folder in which a trainer hands weights to the engines of its node.

`index.json` = ``{"policy_version": int, "files": [names], "checksums": {tensor: text}}``, written last,
beside safetensors files that hold the weights under their Hugging Face names; `yatt.weights.checksum`
defines the text. It lies on a memory filesystem, so reading it is a copy from memory. This module is free
of torch: the scripted engine reads the index too.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from yatt.errors import WorkerFailed

INDEX_NAME = "index.json"


class _Taken:
    """Tensors that this process took from publications or compared with them. Counted in one place: engines
    take them deep inside their libraries."""

    num = 0


def note_tensor() -> None:
    """One more was taken or compared."""
    _Taken.num += 1


def tensors_taken() -> int:
    """How many were, all in all: a sign that a long update gets on."""
    return _Taken.num


class _Index(msgspec.Struct, frozen=True):
    policy_version: int
    files: tuple[str, ...]
    checksums: dict[str, str]


@dataclass(frozen=True, slots=True)
class Publication:
    """One published set of weights."""

    policy_version: int
    files: tuple[Path, ...]
    checksums: dict[str, str]
    """By Hugging Face name of the tensor."""


def read_publication(folder: str, policy_version: int) -> Publication:
    """The publication in `folder`, if it is of that policy version and whole.

    Raises:
        WorkerFailed: it is not there, torn, or of another version.
    """
    path = Path(folder) / INDEX_NAME
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except OSError as error:
        raise WorkerFailed(
            f"no weights of policy version {policy_version} in {folder}: {path} cannot be read "
            f"({error.strerror}); the trainer's Publish of that version should have written it"
        ) from error
    except msgspec.DecodeError as error:
        raise WorkerFailed(f"{path} is not an index of published weights: {error}") from error
    if index.policy_version != policy_version:
        raise WorkerFailed(
            f"{path} is of policy version {index.policy_version}, but version {policy_version} was asked for"
        )
    files = tuple(Path(folder) / name for name in index.files)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WorkerFailed(f"{path} names {', '.join(missing)}, not there in {folder}")
    return Publication(index.policy_version, files, index.checksums)
