"""Reads the index of the weights that are published on this node.

A publication is `index.json`, a `PublicationIndex`. A stem is the path of the host copy of a trainer rank, on
the node's memory filesystem; its plan says which boxes of which tensors it contains
(`yatt.weights.published`). Weights are read from there, so a publication is no copy. This module does not
import torch, because the scripted engine reads the index too.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from yatt.adapters.node_local.host_segment import Stamp
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


class PublicationIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content; `sums` has the checksums of some tensors, by name. `part`: the number of this node
    in an engine that spans several, of whose slices `part_sums` has the checksums; None: the node has all."""

    policy_version: int
    attempt: int
    stems: tuple[str, ...]
    sums: dict[str, int]
    part: int | None = None
    part_sums: dict[str, int] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One published set of weights.

    Args:
        sums: checksums of whole tensors.
        here: checksums of what this node has of them.
        part: the slices that it has; None: all.
    """

    stamp: Stamp
    stems: tuple[Path, ...]
    sums: dict[str, int]
    here: dict[str, int]
    part: int | None = None


def read_publication(folder: str, policy_version: int) -> Publication:
    """Reads the publication in `folder` and checks that it is of that policy version.

    Raises:
        WorkerFailed: it is missing, or of another version.
    """
    path = Path(folder) / INDEX_NAME
    try:
        index = msgspec.json.decode(path.read_bytes(), type=PublicationIndex)
    except OSError as error:
        raise WorkerFailed(
            f"no weights of policy version {policy_version} in {folder}: {path} cannot be read "
            f"({error.strerror}); this node's controller should have written it"
        ) from error
    except msgspec.DecodeError as error:
        raise WorkerFailed(f"{path} is not an index of published weights: {error}") from error
    if index.policy_version != policy_version:
        raise WorkerFailed(
            f"{path} is of policy version {index.policy_version}, but version {policy_version} was asked for"
        )
    stamp = Stamp(index.attempt, policy_version)
    return Publication(
        stamp=stamp,
        stems=tuple(map(Path, index.stems)),
        sums=index.sums,
        here=index.sums | index.part_sums,
        part=index.part,
    )
