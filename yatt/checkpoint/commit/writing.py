"""Writes planned pieces as files of a checkpoint. No torch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import xxhash

from yatt.adapters.files.files import Buffer
from yatt.checkpoint.commit.pieces import header_of
from yatt.checkpoint.store.store import Written
from yatt.records.message import PlannedPiece, ShardFile, TensorPiece

Contents = Callable[[], Iterable[Iterable[Buffer]]]
"""Begins to read: yields the blocks of each piece, in order."""


class Streams(Protocol):
    """The part of a store that writing files needs."""

    def write_stream(self, name: str, chunks: Callable[[], Iterable[Buffer]]) -> Written:
        """See `yatt.checkpoint.store.store.Store`."""


def write_file(store: Streams, path: str, pieces: Sequence[PlannedPiece], contents: Contents) -> ShardFile:
    """Writes these pieces as one safetensors file whose tensors are named by their index.

    Args:
        contents: called again if the store retries. A block is used before the next one is requested.
    """
    header = header_of((piece.dtype, piece.local_shape, piece.size_bytes) for piece in pieces)
    written_pieces: list[TensorPiece] = []

    def chunks() -> Iterator[Buffer]:
        written_pieces.clear()  # pieces of an interrupted stream
        yield header
        begin = len(header)
        for piece, blocks in zip(pieces, contents(), strict=True):
            digest = xxhash.xxh3_128()
            for block in blocks:
                digest.update(block)
                yield block
            written_pieces.append(_written(piece, begin, digest.hexdigest()))
            begin += piece.size_bytes

    written = store.write_stream(path, chunks)
    return ShardFile(
        path=path, size_bytes=written.size_bytes, checksum=written.checksum, tensors=tuple(written_pieces)
    )


def _written(piece: PlannedPiece, begin: int, checksum: str) -> TensorPiece:
    return TensorPiece(
        key=piece.key,
        dtype=piece.dtype,
        global_shape=piece.global_shape,
        global_offset=piece.global_offset,
        local_shape=piece.local_shape,
        begin=begin,
        size_bytes=piece.size_bytes,
        checksum=checksum,
    )
