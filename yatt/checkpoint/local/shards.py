"""Cuts boxes of global tensors into pieces and reads them: any layout can read files of any other.

A rank's boxes become safetensors files, piece by piece (`yatt.checkpoint.commit.writing`). Reading intersects
the wanted boxes with the saved ones, in any number of dimensions, and fetches only the byte ranges of those
pieces. Each piece has its own checksum, so a part of a file is verified without reading the rest.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from yatt.checkpoint.commit.pieces import check_piece
from yatt.checkpoint.local.local_first import Ranges
from yatt.errors import CheckpointError
from yatt.records.message import PlannedPiece, ShardFile, TensorPiece

PIECE_BYTES = 16 << 20
"""Maximum bytes of a piece, except a single longer row one element wide; a writer holds one at a time."""
FETCH_BYTES = 64 << 20
"""Bytes that a reader requests in one call, if no single piece has more."""


def _nothing() -> None:
    """Does nothing; the default of `tick`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A box of the global tensor `key`; `tensor` has as many dimensions as the global one."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


def box_parts(shard: Shard) -> Iterator[Shard]:
    """Yields the box in pieces of at most PIECE_BYTES, cut along its first dimension that can be cut."""
    tensor = shard.tensor
    axis = next((axis for axis, size in enumerate(tensor.shape) if size > 1), None)
    if tensor.nbytes <= PIECE_BYTES or axis is None:
        yield shard
        return
    step = max(1, PIECE_BYTES * tensor.shape[axis] // tensor.nbytes)
    for first in range(0, tensor.shape[axis], step):
        offset = list(shard.offset)
        offset[axis] += first
        part = tensor.narrow(axis, first, min(step, tensor.shape[axis] - first))
        yield from box_parts(replace(shard, offset=tuple(offset), tensor=part))


def planned_piece(part: Shard, area: str, at: int) -> PlannedPiece:
    """The piece of a part that is in the host copy's segment `area`, from byte `at` of its data on."""
    return PlannedPiece(
        key=part.key,
        dtype=_dtype_name(part.tensor),
        global_shape=part.global_shape,
        global_offset=part.offset,
        local_shape=tuple(part.tensor.shape),
        area=area,
        at=at,
        size_bytes=part.tensor.nbytes,
    )


@torch.no_grad()
def read_shards(
    store: Ranges, files: Sequence[ShardFile], wanted: Sequence[Shard], tick: Callable[[], None] = _nothing
) -> None:
    """Fills the tensors of `wanted`, in place, from the files that contain parts of them.

    Args:
        tick: called after each piece.

    Raises:
        CheckpointError: a piece is damaged, or a tensor is incomplete or of another shape or dtype.
    """
    by_key: dict[str, list[Shard]] = {}
    missing = {id(shard): shard.tensor.numel() for shard in wanted}
    for shard in wanted:
        by_key.setdefault(shard.key, []).append(shard)
    for file in files:
        needed = [
            (piece, shards)
            for piece in file.tensors
            if (shards := [shard for shard in by_key.get(piece.key, ()) if _common(piece, shard)])
        ]
        for piece, saved, shards in _fetched(store, file, needed):
            for shard in shards:
                missing[id(shard)] -= _fill(shard, piece, saved)
            tick()
    for shard in wanted:
        if missing[id(shard)]:
            raise CheckpointError(f"the checkpoint lacks {missing[id(shard)]} elements of {shard.key}")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _fetched(
    store: Ranges, file: ShardFile, needed: list[tuple[TensorPiece, list[Shard]]]
) -> Iterator[tuple[TensorPiece, Tensor, list[Shard]]]:
    """Yields the needed pieces of one file, verified, a few at a time."""
    total = itertools.accumulate(piece.size_bytes for piece, _ in needed)
    for _, group in itertools.groupby(zip(total, needed, strict=True), lambda pair: pair[0] // FETCH_BYTES):
        some = [pair for _, pair in group]
        ranges = [(piece.begin, piece.begin + piece.size_bytes) for piece, _ in some]
        for (piece, shards), data in zip(some, store.read_ranges(file.path, ranges), strict=True):
            yield piece, _verified(file, piece, data), shards


def _verified(file: ShardFile, piece: TensorPiece, data: bytes) -> Tensor:
    """Returns the piece as a tensor, if its bytes match the checksum."""
    check_piece(file, piece, data)
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, piece.dtype)).view(piece.local_shape)


def _fill(shard: Shard, piece: TensorPiece, saved: Tensor) -> int:
    """Copies the common elements; returns their number."""
    ranges = _common(piece, shard)
    assert ranges is not None, "only boxes with something in common are paired"
    if piece.dtype != _dtype_name(shard.tensor):
        raise CheckpointError(
            f"{shard.key} was saved as {piece.dtype}, the model wants {_dtype_name(shard.tensor)}"
        )
    there = tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, piece.global_offset, strict=True))
    here = tuple(slice(b - o, e - o) for (b, e), o in zip(ranges, shard.offset, strict=True))
    shard.tensor[here].copy_(saved[there])
    return math.prod(end - begin for begin, end in ranges)


def _common(piece: TensorPiece, shard: Shard) -> list[tuple[int, int]] | None:
    """Returns begin and end of the common box in each dimension of the global tensor; None if there is none.

    Raises:
        CheckpointError: they are of tensors of different shapes.
    """
    if piece.global_shape != shard.global_shape:
        raise CheckpointError(
            f"{shard.key} was saved as {piece.global_shape}, the model wants {shard.global_shape}"
        )
    ranges = [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(
            piece.global_offset, piece.local_shape, shard.offset, shard.tensor.shape, strict=True
        )
    ]
    return ranges if all(begin < end for begin, end in ranges) else None
