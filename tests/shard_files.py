"""Files of a checkpoint made from tensors, as the uploader makes them from a host copy."""

from collections.abc import Callable, Sequence

import torch

from yatt.checkpoint.shards import Shard, parts_of, planned
from yatt.checkpoint.store import Store
from yatt.checkpoint.writing import write_file
from yatt.records.message import PlannedPiece, ShardFile


def write_shards(
    store: Store, path: str, shards: Sequence[Shard], tick: Callable[[], None] = lambda: None
) -> ShardFile:
    """Writes these boxes as one file; `tick` is called after each piece."""
    parts = [part for shard in shards for part in parts_of(shard)]
    pieces = [planned(part, "memory", index) for index, part in enumerate(parts)]

    def read(piece: PlannedPiece) -> bytes:
        tick()
        flat = parts[piece.at].tensor.detach().contiguous().view(-1)
        return bytes(flat.view(torch.uint8).numpy())

    return write_file(store, path, pieces, lambda: ((read(piece),) for piece in pieces))
