"""Verifies checkpoints: every byte of every file, and that the pieces are whole tensors. No torch."""

import math
from collections import Counter
from dataclasses import dataclass

from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.store.store import Store
from yatt.checkpoint.store.streams import AnyFile, Damage, FileCheck, Tick, file_chunks, in_threads
from yatt.errors import CheckpointError, StoreUnreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Result for one checkpoint.

    Args:
        name: of its manifest.
        size_bytes: of all files; 0 if the manifest cannot be read.
    """

    name: str
    size_bytes: int
    damages: tuple[Damage, ...]


def files_of(manifest: Manifest) -> list[AnyFile]:
    """Returns all files of a checkpoint."""
    return [*manifest.files, *manifest.nodes]


def manifest_bytes(manifest: Manifest) -> int:
    """Returns the bytes of all files of a checkpoint."""
    return sum(file.size_bytes for file in files_of(manifest))


def verify_checkpoint(checkpoints: Checkpoints, name: str, tick: Tick) -> Verified:
    """Reads a whole checkpoint.

    Raises:
        StoreUnreachable: the store does not answer; this says nothing about the checkpoint.
    """
    try:
        manifest = checkpoints.read(name)
    except CheckpointError as error:
        damage = Damage(path=name, reason=error.says)
        return Verified(name=name, size_bytes=0, damages=(damage,))

    def check(file: AnyFile, step: Tick) -> list[Damage]:
        return _check_file(checkpoints.store, file, step)

    found = [damage for some in in_threads(files_of(manifest), check, tick) for damage in some]
    found += incomplete_tensors(manifest, name).values()
    return Verified(name=name, size_bytes=manifest_bytes(manifest), damages=tuple(found))


def incomplete_tensors(manifest: Manifest, name: str) -> dict[str, Damage]:
    """Returns the tensors of which the pieces do not have each element once, by their numbers."""
    counts: Counter[str] = Counter()
    wholes: dict[str, int] = {}
    for piece in (piece for file in manifest.files for piece in file.tensors):
        counts[piece.key] += math.prod(piece.local_shape)
        wholes[piece.key] = math.prod(piece.global_shape)  # the same for each of its pieces
    return {
        key: Damage(path=name, reason=f"{key} has {counts[key]} of {whole} elements")
        for key, whole in wholes.items()
        if counts[key] != whole
    }


def _check_file(store: Store, file: AnyFile, step: Tick) -> list[Damage]:
    check = FileCheck(file)
    try:
        size = store.size(file.path)
        if size is None or size > file.size_bytes:
            reason = "is missing" if size is None else f"has {size} bytes instead of {file.size_bytes}"
            return [Damage(path=file.path, reason=reason)]
        for chunk in file_chunks(store, file, step):
            check.feed(chunk)
    except CheckpointError as error:
        return [Damage(path=file.path, reason=f"cannot be read ({error})")]
    except StoreUnreachable as error:
        if error.is_passing:
            raise
        return [Damage(path=file.path, reason=f"cannot be read ({error})")]
    return check.damages()
