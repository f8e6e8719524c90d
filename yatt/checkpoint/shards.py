"""Boxes of global tensors to files and back: any layout reads what any other wrote.

A rank writes one safetensors file with the boxes it is responsible for. Reading intersects the
boxes wanted with the boxes there are, in any number of dimensions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from yatt.checkpoint.format import FileEntry, TensorBox, digest
from yatt.checkpoint.manifest import read_verified
from yatt.checkpoint.store import Store
from yatt.errors import CheckpointError
from yatt.records.message import ShardFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A box of the global tensor `key`; `tensor` has as many dimensions as the global one.

    `may_grow`: the global shape may differ from the saved one (a padded vocabulary); what was not saved is 0.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    may_grow: bool = False


def write_shards(store: Store, name: str, shards: Sequence[Shard]) -> ShardFile:
    """Write these boxes as one file."""
    tensors = {str(index): shard.tensor.detach().cpu().contiguous() for index, shard in enumerate(shards)}
    boxes = tuple(
        TensorBox(
            name=str(index),
            key=shard.key,
            global_shape=shard.global_shape,
            offset=shard.offset,
            shape=tuple(shard.tensor.shape),
            dtype=str(shard.tensor.dtype).removeprefix("torch."),
        )
        for index, shard in enumerate(shards)
    )
    data = save(tensors)
    store.write(name, data)
    return ShardFile(
        path=name,
        size_bytes=len(data),
        sha256=digest(data),
        tensors=msgspec.Raw(msgspec.msgpack.encode(boxes)),
    )


@torch.no_grad()
def read_shards(store: Store, prefix: str, files: Sequence[FileEntry], wanted: Sequence[Shard]) -> None:
    """Fill the tensors of `wanted`, in place, from the files that hold parts of them.

    Raises:
        CheckpointError: a file is damaged, or a tensor is not wholly there or of another shape.
    """
    shapes = {box.key: box.global_shape for entry in files for box in entry.tensors}
    by_key: dict[str, list[Shard]] = {}
    missing: dict[int, int] = {}
    for shard in wanted:
        by_key.setdefault(shard.key, []).append(shard)
        missing[id(shard)] = _num_saved(shard, shapes.get(shard.key))
        shard.tensor.zero_()
    for entry in files:
        pairs = [
            (box, shard) for box in entry.tensors for shard in by_key.get(box.key, ()) if _overlap(box, shard)
        ]
        tensors = load(read_verified(store, prefix, entry)) if pairs else {}
        for box, shard in pairs:
            missing[id(shard)] -= _fill(shard, box, tensors[box.name])
    for shard in wanted:
        if missing[id(shard)]:
            raise CheckpointError(f"{prefix} lacks {missing[id(shard)]} elements of {shard.key}")


def _num_saved(shard: Shard, saved_shape: tuple[int, ...] | None) -> int:
    """How many of the wanted elements lie in the global tensor as it was saved."""
    if saved_shape is None:
        return shard.tensor.numel()
    if saved_shape != shard.global_shape and not shard.may_grow:
        raise CheckpointError(f"{shard.key} was saved as {saved_shape}, the model wants {shard.global_shape}")
    zeros = (0,) * len(saved_shape)
    whole = TensorBox("", shard.key, saved_shape, zeros, saved_shape, "")
    return _num_elements(_overlap(whole, shard))


def _num_elements(ranges: list[tuple[int, int]] | None) -> int:
    return 0 if ranges is None else math.prod(end - begin for begin, end in ranges)


def _fill(shard: Shard, box: TensorBox, saved: Tensor) -> int:
    """Copy what both have; gives the number of elements."""
    ranges = _overlap(box, shard)
    assert ranges is not None, "only boxes with something in common are paired"
    there = tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, box.offset, strict=True))
    here = tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, shard.offset, strict=True))
    shard.tensor[here].copy_(saved[there])
    return _num_elements(ranges)


def _overlap(box: TensorBox, shard: Shard) -> list[tuple[int, int]] | None:
    """Begin and end of the common box in each dimension of the global tensor; None if there is none."""
    ranges = [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(box.offset, box.shape, shard.offset, shard.tensor.shape, strict=True)
    ]
    return ranges if all(begin < end for begin, end in ranges) else None
