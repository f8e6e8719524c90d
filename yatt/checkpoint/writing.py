"""Writes planned pieces as files of a checkpoint. No torch."""

from collections.abc import Callable, Iterator, Sequence

from yatt.adapters.files import Buffer
from yatt.checkpoint.pieces import checksum, header_of
from yatt.checkpoint.store import Store
from yatt.records.message import PlannedPiece, ShardFile, TensorPiece

Read = Callable[[PlannedPiece], Buffer]


def write_file(store: Store, path: str, pieces: Sequence[PlannedPiece], read: Read) -> ShardFile:
    """Writes these pieces as one safetensors file whose tensors are named by their index.

    Args:
        read: returns a piece's bytes; called in order, and again from the first if the store retries.
    """
    header = header_of((piece.dtype, piece.local_shape, piece.size_bytes) for piece in pieces)
    written_pieces: list[TensorPiece] = []

    def chunks() -> Iterator[Buffer]:
        written_pieces.clear()  # pieces of an interrupted stream
        yield header
        begin = len(header)
        for piece in pieces:
            data = read(piece)
            written_pieces.append(_written(piece, begin, data))
            begin += len(data)
            yield data

    written = store.write_stream(path, chunks)
    return ShardFile(
        path=path, size_bytes=written.size_bytes, checksum=written.checksum, tensors=tuple(written_pieces)
    )


def _written(piece: PlannedPiece, begin: int, data: Buffer) -> TensorPiece:
    return TensorPiece(
        key=piece.key,
        dtype=piece.dtype,
        global_shape=piece.global_shape,
        global_offset=piece.global_offset,
        local_shape=piece.local_shape,
        begin=begin,
        size_bytes=len(data),
        checksum=checksum(data),
    )
