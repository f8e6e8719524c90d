"""The slices of a rank's weights that one node of an engine needs, packed one after the other. No torch.

A node fetches them in place of the whole segment (adr/0044). Their plan has the boxes of the rank's own
plan, each cut to what the node's ranks have, at its place in the packed bytes; `ByteRows` says where the
bytes come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from yatt.adapters.node_local.host_segment import aligned_size
from yatt.records.weights import DTYPE_BYTES, PlannedWeight, WeightBox, WeightCut, WeightPlan

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRows:
    """Rows of bytes of a segment, equally far from one another, that are packed from byte `at` on.

    Args:
        begin: first byte in the segment.
        stride: bytes from the beginning of a row to that of the next.
    """

    at: int
    begin: int
    row_bytes: int
    num_rows: int
    stride: int

    @property
    def end(self) -> int:
        """Byte after the last packed one."""
        return self.at + self.row_bytes * self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """What one node needs of a rank's segment.

    Args:
        plan: of the packed bytes.
        size_bytes: of all packed bytes.
        unknown_bytes: of tensors that are whole because the engine's cut is not known.
    """

    plan: WeightPlan
    runs: tuple[ByteRows, ...]
    size_bytes: int
    unknown_bytes: int


def part_extent(shape: Sequence[int], cut: WeightCut | None, part: int | None) -> Extent:
    """Returns the box of a tensor that the node with number `part` of an engine needs; it may be empty.

    Args:
        part: None: all of it.
    """
    offset, size = [0] * len(shape), list(shape)
    if cut is not None and part is not None:
        begin, end = cut.spans[part]
        offset[cut.dim], size[cut.dim] = begin, end - begin
    return tuple(offset), tuple(size)


def common_extent(one: Extent, other: Extent) -> Extent | None:
    """Returns the box that both boxes contain; None if there is none."""
    offset, shape = [], []
    for first, size, its_first, its_size in zip(*one, *other, strict=True):
        begin, end = max(first, its_first), min(first + size, its_first + its_size)
        if begin >= end:
            return None
        offset.append(begin)
        shape.append(end - begin)
    return tuple(offset), tuple(shape)


def sliced_plan(plan: WeightPlan, part: int) -> Slices:
    """Returns what the node with number `part` of an engine needs of a rank's segment. Each tensor of the
    rank stays in the plan, without boxes if nothing of it is needed from this rank."""
    runs, weights, at, unknown = list[ByteRows](), list[PlannedWeight](), 0, 0
    for planned in plan.weights:
        item, boxes = DTYPE_BYTES[planned.dtype], list[WeightBox]()
        wanted = part_extent(planned.shape, planned.cut, part)
        for box in planned.boxes if planned.is_given else ():
            if (common := common_extent((box.offset, box.shape), wanted)) is None:
                continue
            run = _run(box, common, item, at)
            runs.append(run)
            boxes.append(WeightBox(offset=common[0], shape=common[1], at=at))
            at = aligned_size(run.end)
            unknown += 0 if planned.is_known else run.end - run.at
        weights.append(msgspec.structs.replace(planned, boxes=tuple(boxes)))
    packed = WeightPlan(rank=plan.rank, weights=tuple(weights))
    return Slices(plan=packed, runs=tuple(runs), size_bytes=at, unknown_bytes=unknown)


def _run(box: WeightBox, common: Extent, item: int, at: int) -> ByteRows:
    """The bytes of a box's smaller box, which is cut in one of the first two dimensions."""
    offset, shape = common
    stride = math.prod(box.shape[1:]) * item
    begin = box.at + (offset[0] - box.offset[0]) * stride
    if shape[1:] == box.shape[1:]:
        size = shape[0] * stride
        return ByteRows(at=at, begin=begin, row_bytes=size, num_rows=1, stride=size)
    begin += (offset[1] - box.offset[1]) * item
    return ByteRows(at=at, begin=begin, row_bytes=shape[1] * item, num_rows=shape[0], stride=stride)
