"""Maps elements of a rank's local parameter to boxes of the global tensor. Pure integers, no torch.

Tensor parallelism splits a parameter into blocks of whole rows. The distributed optimizer splits the
flattened local parameter again, at any element. Such a flat range of a matrix has at most three boxes per
block (the end of a row, whole rows, the beginning of a row).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from yatt.weights.names import EMBEDDING, OUTPUT, Entry
from yatt.weights.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of a local parameter that form one box of the global tensor.

    `first_row` is an index of the local parameter; `shape` and `offset` have one number per dimension.
    """

    first_row: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of the global tensor, contiguous in the flattened local parameter from element `start` on."""

    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def full_shape(entry: Entry, shape: ModelShape) -> tuple[int, ...]:
    """Shape of the global parameter, without padding of the vocabulary."""
    leaf = entry.name.removeprefix("decoder.").split(".", 2)[-1] if "layers" in entry.name else entry.name
    qkv_rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (shape.vocab_size, shape.hidden_size),
        OUTPUT: (shape.vocab_size, shape.hidden_size),
        "self_attention.linear_qkv.weight": (qkv_rows, shape.hidden_size),
        "self_attention.linear_qkv.bias": (qkv_rows,),
        "self_attention.q_layernorm.weight": (shape.head_dim,),
        "self_attention.k_layernorm.weight": (shape.head_dim,),
        "self_attention.linear_proj.weight": (shape.hidden_size, shape.num_heads * shape.head_dim),
        "mlp.linear_fc1.weight": (2 * shape.ffn_size, shape.hidden_size),
        "mlp.linear_fc2.weight": (shape.hidden_size, shape.ffn_size),
    }
    return sizes.get(leaf, (shape.hidden_size,))


def blocks_of(entry: Entry, shape: ModelShape, *, rank: int, size: int) -> list[Block]:
    """Blocks of the local parameter of tensor-parallel rank `rank` of `size`, in the order of its rows.

    Rows that pad the vocabulary are in no block.
    """
    whole = full_shape(entry, shape)
    rows, rest = whole[0], whole[1:]
    zeros = (0,) * len(rest)
    if entry.cut == "whole":
        return [Block(first_row=0, shape=whole, offset=(0, *zeros))]
    if entry.cut == "columns":
        width = rest[0] // size
        return [Block(first_row=0, shape=(rows, width), offset=(0, rank * width))]
    if entry.cut == "gate_up":
        height = rows // 2 // size
        return [
            Block(first_row=half * height, shape=(height, *rest), offset=(first, *zeros))
            for half, first in enumerate((rank * height, rows // 2 + rank * height))
        ]
    height = -(-rows // size)  # size * height exceeds rows only if the vocabulary is padded
    real = min(height, rows - rank * height)
    return [Block(first_row=0, shape=(real, *rest), offset=(rank * height, *zeros))] if real > 0 else []


def boxes_of(blocks: Sequence[Block], begin: int, end: int) -> Iterator[Box]:
    """Yields the boxes of the flat elements [begin, end) of a local parameter that are in a block."""
    for block in blocks:
        yield from _vector_boxes(block, begin, end) if len(block.shape) == 1 else _boxes(block, begin, end)


def _vector_boxes(block: Block, begin: int, end: int) -> Iterator[Box]:
    first, last = max(begin, block.first_row), min(end, block.first_row + block.shape[0])
    if first < last:
        offset = block.offset[0] + first - block.first_row
        yield Box(start=first, shape=(last - first,), offset=(offset,))


def _boxes(block: Block, begin: int, end: int) -> Iterator[Box]:
    height, width = block.shape
    origin = block.first_row * width
    at, last = max(begin - origin, 0), min(end - origin, height * width)
    while at < last:
        row, column = divmod(at, width)
        is_part = column > 0 or last - at < width
        size = min(width - column, last - at) if is_part else (last - at) // width * width
        yield Box(
            start=origin + at,
            shape=(1, size) if is_part else (size // width, width),
            offset=(block.offset[0] + row, block.offset[1] + column),
        )
        at += size
