"""The format of a checkpoint's shard files: a safetensors header, then the bytes of pieces. No torch.

A piece is a box of a whole tensor. Each piece has its own checksum, so a part of a file is verified without
reading the rest. Checksums detect damage, not an adversary; a manifest's seal is SHA-256.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import xxhash

from yatt.adapters.files.files import Buffer
from yatt.errors import CheckpointError
from yatt.records.message import ShardFile, TensorPiece

SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
}
"""By the dtype's name in torch. Source: the format's description, https://huggingface.co/docs/safetensors."""

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}


FILE_BYTES = 512 << 20
"""Most bytes of the pieces of a shard file, if no single piece has more. Uploads are retried file by file."""

Sized = TypeVar("Sized")


def in_files(items: Iterable[Sized], size_of: Callable[[Sized], int], most_bytes: int) -> list[list[Sized]]:
    """Deals items, in order, to files of at most so many bytes, if no single item has more."""
    files: list[list[Sized]] = []
    room = 0
    for item in items:
        if not files or size_of(item) > room:
            files.append([])
            room = most_bytes
        files[-1].append(item)
        room -= size_of(item)
    return files


def checksum(data: Buffer) -> str:
    """XXH3 of the bytes, 128 bits in hex: it is faster than memory, and the GIL is released meanwhile."""
    return xxhash.xxh3_128_hexdigest(data)


def header_of(tensors: Iterable[tuple[str, Sequence[int], int]]) -> bytes:
    """The beginning of a safetensors file: its length, and JSON of names, dtypes, shapes and offsets.

    Args:
        tensors: torch's name of the dtype, shape, and size in bytes; the tensor's name is its index.
    """
    table, begin = {}, 0
    for index, (dtype, shape, size_bytes) in enumerate(tensors):
        end = begin + size_bytes
        table[str(index)] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    body = json.dumps(table).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def check_piece(file: ShardFile, piece: TensorPiece, data: Buffer) -> None:
    """Compares bytes that were read with the saved piece.

    Raises:
        CheckpointError: they differ, or the piece's dtype is unknown.
    """
    found = checksum(data)
    if len(data) != piece.size_bytes or found != piece.checksum:
        raise CheckpointError(
            f"{file.path} is not what was saved: of {piece.key} at byte {piece.begin} there are {len(data)} "
            f"of {piece.size_bytes} bytes, checksum {found[:12]} instead of {piece.checksum[:12]}"
        )
    if piece.dtype not in SAFETENSORS_NAMES:
        raise CheckpointError(f"{file.path}: {piece.key} has the unknown dtype '{piece.dtype}'")
