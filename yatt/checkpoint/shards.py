"""Boxes of global tensors to files and back: any layout reads what any other wrote.

A rank writes one safetensors file with the boxes it is responsible for. Reading intersects the
boxes wanted with the boxes there are, in any number of dimensions.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from yatt.checkpoint.store import Store
from yatt.errors import CheckpointError
from yatt.records.message import ShardFile, TensorPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A box of the global tensor `key`; `tensor` has as many dimensions as the global one.

    `may_grow`: the global shape may differ from the saved one (a padded vocabulary); what was not
    saved is 0.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    may_grow: bool = False


def write_shards(store: Store, path: str, shards: Sequence[Shard]) -> ShardFile:
    """Write these boxes as one file; its tensors are named by their index."""
    tensors = {str(index): shard.tensor.detach().cpu().contiguous() for index, shard in enumerate(shards)}
    pieces = tuple(
        TensorPiece(
            key=shard.key,
            dtype=str(shard.tensor.dtype).removeprefix("torch."),
            global_shape=shard.global_shape,
            global_offset=shard.offset,
            local_shape=tuple(shard.tensor.shape),
        )
        for shard in shards
    )
    data = save(tensors)
    store.write(path, data)
    return ShardFile(path=path, size_bytes=len(data), sha256=_digest(data), tensors=pieces)


@torch.no_grad()
def read_shards(store: Store, files: Sequence[ShardFile], wanted: Sequence[Shard]) -> None:
    """Fill the tensors of `wanted`, in place, from the files that hold parts of them.

    Raises:
        CheckpointError: a file is damaged, or a tensor is not wholly there or of another shape.
    """
    shapes = {piece.key: piece.global_shape for file in files for piece in file.tensors}
    by_key: dict[str, list[Shard]] = {}
    missing: dict[int, int] = {}
    for shard in wanted:
        by_key.setdefault(shard.key, []).append(shard)
        missing[id(shard)] = _num_saved(shard, shapes.get(shard.key))
        shard.tensor.zero_()
    for file in files:
        pairs = [
            (index, shard)
            for index, piece in enumerate(file.tensors)
            for shard in by_key.get(piece.key, ())
            if _overlap(piece.global_offset, piece.local_shape, shard)
        ]
        tensors = load(_verified(store, file)) if pairs else {}
        for index, shard in pairs:
            missing[id(shard)] -= _fill(shard, file.tensors[index], tensors[str(index)])
    for shard in wanted:
        if missing[id(shard)]:
            raise CheckpointError(f"the checkpoint lacks {missing[id(shard)]} elements of {shard.key}")


def _verified(store: Store, file: ShardFile) -> bytes:
    """The file's bytes, if they are the ones that were written."""
    data = store.read(file.path)
    if len(data) != file.size_bytes or _digest(data) != file.sha256:
        raise CheckpointError(
            f"{file.path} is not what was saved: {len(data)} of {file.size_bytes} bytes, "
            f"sha256 {_digest(data)[:12]} instead of {file.sha256[:12]}"
        )
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _num_saved(shard: Shard, saved_shape: tuple[int, ...] | None) -> int:
    """How many of the wanted elements lie in the global tensor as it was saved."""
    if saved_shape is None:
        return shard.tensor.numel()
    if saved_shape != shard.global_shape and not shard.may_grow:
        raise CheckpointError(f"{shard.key} was saved as {saved_shape}, the model wants {shard.global_shape}")
    return _num_elements(_overlap((0,) * len(saved_shape), saved_shape, shard))


def _fill(shard: Shard, piece: TensorPiece, saved: Tensor) -> int:
    """Copy what both have; gives the number of elements."""
    ranges = _overlap(piece.global_offset, piece.local_shape, shard)
    assert ranges is not None, "only boxes with something in common are paired"
    there = tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, piece.global_offset, strict=True))
    here = tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, shard.offset, strict=True))
    shard.tensor[here].copy_(saved[there])
    return _num_elements(ranges)


def _num_elements(ranges: list[tuple[int, int]] | None) -> int:
    return 0 if ranges is None else math.prod(end - begin for begin, end in ranges)


def _overlap(offset: tuple[int, ...], shape: tuple[int, ...], shard: Shard) -> list[tuple[int, int]] | None:
    """Begin and end of the common box in each dimension of the global tensor; None if there is none."""
    ranges = [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(offset, shape, shard.offset, shard.tensor.shape, strict=True)
    ]
    return ranges if all(begin < end for begin, end in ranges) else None
