"""Reads the folder in which a trainer publishes weights for the engines of its node.

It has safetensors files with Hugging Face tensor names and, written last, `index.json` =
``{"policy_version": int, "files": [names], "checksums": {tensor: text}}``; `yatt.weights.checksum` defines
the text. The folder is on a memory filesystem, so reading is a copy from memory. This module does not import
torch, because the scripted engine reads the index too.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from yatt.errors import WorkerFailed

INDEX_NAME = "index.json"


class _Taken:
    """Number of tensors that this process read from publications or compared with them. It is global, because
    engines read tensors deep inside their libraries."""

    num = 0


def note_tensor() -> None:
    """Counts one more tensor."""
    _Taken.num += 1


def tensors_taken() -> int:
    """Total number of tensors read or compared; it shows the progress of a long update."""
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
    """Checksum by the tensor's Hugging Face name."""


def read_publication(folder: str, policy_version: int) -> Publication:
    """Reads the publication in `folder` and checks that it is complete and of that policy version.

    Raises:
        WorkerFailed: it is missing, incomplete, or of another version.
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
