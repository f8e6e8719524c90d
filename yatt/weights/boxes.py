"""Maps elements of a rank's local parameter to boxes of the global tensor. Pure integers, no torch.

Tensor parallelism splits a parameter into blocks of whole rows. The distributed optimizer splits the
flattened local parameter again, at any element. Such a flat range of a matrix has at most three boxes per
block (the end of a row, whole rows, the beginning of a row).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from yatt.models.rows import WeightRow


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


def blocks_of(row: WeightRow, dim: int | None, *, rank: int, size: int) -> list[Block]:
    """Blocks of the local parameter of tensor-parallel rank `rank` of `size`, in the order of its rows.

    Rows that pad the vocabulary are in no block.

    Args:
        dim: the dimension that tensor parallelism cuts; None: each rank has the whole parameter.
    """
    whole = row.full_shape
    rows, rest = whole[0], whole[1:]
    zeros = (0,) * len(rest)
    if dim is None:
        return [Block(first_row=0, shape=whole, offset=(0, *zeros))]
    if dim == 1:
        width = rest[0] // size
        return [Block(first_row=0, shape=(rows, width), offset=(0, rank * width))]
    if row.groups == 1 and len(row.parts) > 1:
        return _part_blocks(row, rest, rank=rank, size=size)
    height = -(-rows // size)  # size * height exceeds rows only if the vocabulary is padded
    real = min(height, rows - rank * height)
    return [Block(first_row=0, shape=(real, *rest), offset=(rank * height, *zeros))] if real > 0 else []


def _part_blocks(row: WeightRow, rest: tuple[int, ...], *, rank: int, size: int) -> list[Block]:
    """One block per part: the rank's share of it."""
    blocks, local, first = [], 0, 0
    for part in row.parts:
        height = part.num_rows // size
        offset = (first + rank * height, *(0,) * len(rest))
        blocks.append(Block(first_row=local, shape=(height, *rest), offset=offset))
        local, first = local + height, first + part.num_rows
    return blocks


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
