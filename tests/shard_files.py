"""Files of a checkpoint made from tensors, as the uploader makes them from a host copy."""

from collections.abc import Callable, Sequence

import torch

from yatt.checkpoint.commit.writing import write_file
from yatt.checkpoint.local.shards import Shard, box_parts, planned_piece
from yatt.checkpoint.store.store import Store
from yatt.records.message import PlannedPiece, ShardFile


def write_shards(
    store: Store, path: str, shards: Sequence[Shard], tick: Callable[[], None] = lambda: None
) -> ShardFile:
    """Writes these boxes as one file; `tick` is called after each piece."""
    parts = [part for shard in shards for part in box_parts(shard)]
    pieces = [planned_piece(part, "memory", index) for index, part in enumerate(parts)]

    def read(piece: PlannedPiece) -> bytes:
        tick()
        flat = parts[piece.at].tensor.detach().contiguous().view(-1)
        return bytes(flat.view(torch.uint8).numpy())

    return write_file(store, path, pieces, lambda: ((read(piece),) for piece in pieces))
