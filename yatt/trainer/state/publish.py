"""Publishes weights: makes the host copy's segment of weights the current policy version.

Engines of the node read the segment itself (`yatt.weights.published`), so nothing is gathered or written. A
plan beside the segment, made once, says which boxes of which Hugging Face tensors are where in it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from yatt.adapters.node_local.host_segment import WEIGHTS, weight_plan_path
from yatt.config.schema import RunConfig, TrainerSection
from yatt.models.cuts import engine_cuts, gives_weight
from yatt.models.rows import WeightRow
from yatt.models.spans import RowSpan, row_spans, spans_within
from yatt.records.weights import PlannedWeight, WeightBox, WeightCut, WeightPlan
from yatt.trainer.forward.passes import Tick
from yatt.trainer.mcore.model import Policy
from yatt.trainer.state.host_copy import HostCopy
from yatt.trainer.state.snapshot import LocalParameter, local_parameters
from yatt.weights.boxes import Block, blocks_of
from yatt.weights.checksum import box_sum, dtype_name
from yatt.weights.convert import cut_of

SHARE = 16
"""At each publication a share of the tensors, one part in so many of their bytes, is compared by checksum;
all at the first of an attempt. Stamps, not checksums, exclude bytes of another version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A box of the Hugging Face tensor `name` of this shape; `tensor` is a view of the live parameter.
    `answers`: of the ranks with this box, this one sums it. `is_given`: see PlannedWeight."""

    name: str
    answers: bool
    is_given: bool
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


class Weights:
    """This rank's part of the weights that engines load.

    Args:
        stem: path of the host copy; the plan is written beside it.
    """

    def __init__(self, config: RunConfig, policy: Policy, host: HostCopy, stem: Path) -> None:
        self._host, self._parts = (
            host,
            [part for local in _kept(policy) for part in _parts(policy, local, config.trainer)],
        )
        self._cuts = engine_cuts(config, policy.rows, policy.shape)
        self._shares = shares_of(policy.rows, SHARE)
        """Of the whole model, so that all ranks compare the same tensors."""

        plan = WeightPlan(rank=torch.distributed.get_rank(), weights=tuple(self._planned()))
        weight_plan_path(stem).write_bytes(msgspec.msgpack.encode(plan))
        self._is_first = True

    @torch.no_grad()
    def publish(self, policy_version: int, tick: Tick) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
        """Copies to the host what is not there yet. Returns, by name, what this rank's boxes of the live
        parameters contribute to the checksums of the tensors that are compared this time, and of the slices
        of each node of an engine that spans several."""
        self._host.copy((WEIGHTS,))
        shares = self._shares if self._is_first else [self._shares[policy_version % SHARE]]
        compared, self._is_first = set[str]().union(*shares), False
        sums, part_sums = dict[str, int](), dict[str, list[int]]()
        for part in self._parts:
            if not (part.answers and part.name in compared):
                continue
            cut = self._cuts.cuts.get(part.name)
            for piece, owners in _pieces(part, cut):
                found = box_sum(piece.tensor, piece.offset, piece.shape)
                sums[part.name] = (sums.get(part.name, 0) + found) % (1 << 64)
                if cut is not None:
                    of_parts = part_sums.setdefault(part.name, [0] * len(cut.spans))
                    for owner in owners:
                        of_parts[owner] = (of_parts[owner] + found) % (1 << 64)
            tick()
        return sums, {name: tuple(each) for name, each in part_sums.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of the boxes that this rank answers for."""
        return sum(part.tensor.nbytes for part in self._parts if part.answers)

    def _planned(self) -> Iterator[PlannedWeight]:
        by_name: dict[str, list[_Part]] = {}
        for part in self._parts:
            by_name.setdefault(part.name, []).append(part)
        for name, parts in by_name.items():
            places = [self._host.place(part.tensor) for part in parts]
            assert all(area == WEIGHTS for area, _ in places)
            boxes = tuple(
                WeightBox(offset=part.offset, shape=tuple(part.tensor.shape), at=at)
                for part, (_, at) in zip(parts, places, strict=True)
            )
            yield PlannedWeight(
                name=name,
                dtype=dtype_name(parts[0].tensor),
                shape=parts[0].shape,
                boxes=boxes,
                cut=self._cuts.cuts.get(name),
                is_known=name not in self._cuts.unknown,
                is_given=parts[0].is_given,
            )


def shares_of(rows: Iterable[WeightRow], num_shares: int) -> list[set[str]]:
    """Deals the Hugging Face tensors of a model to shares of similar size, the largest tensor first."""
    sizes: Counter[str] = Counter()
    for row in rows:
        for span in row_spans(row):
            sizes[span.name] += span.num_rows * math.prod(row.full_shape[1:])
    shares: list[set[str]] = [set() for _ in range(num_shares)]
    totals = [0] * num_shares
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        least = totals.index(min(totals))
        shares[least].add(name)
        totals[least] += size
    return shares


def _kept(policy: Policy) -> Iterator[LocalParameter]:
    """The parameters of which this rank's engines read something. Of the tensor-parallel ranks that have a
    whole parameter, the first one gives it."""
    for local in local_parameters(policy):
        is_first = policy.groups.sharing(local.row).rank() == 0
        if not local.is_copy and (is_first or cut_of(local.row, local.parameter) is not None):
            yield local


def _parts(policy: Policy, local: LocalParameter, section: TrainerSection) -> Iterator[_Part]:
    group, spans = policy.groups.sharing(local.row), row_spans(local.row)
    world = torch.distributed
    is_given = gives_weight(local.row, world.get_rank(), world.get_world_size(), section)
    heights = {span.name: 0 for span in spans}
    for span in spans:
        heights[span.name] += span.num_rows
    for block in blocks_of(
        local.row, cut_of(local.row, local.parameter), rank=group.rank(), size=group.size()
    ):
        first, rows = block.offset[0], block.shape[0]
        for span in spans_within(spans, first, first + rows):
            yield _part(local, block, span, heights[span.name], is_given=is_given)


def _pieces(part: _Part, cut: WeightCut | None) -> Iterator[tuple[_Part, list[int]]]:
    """Yields a box in pieces that each node of an engine has all or nothing of, and the nodes that have it:
    so each byte is read once, also if several nodes have it."""
    if cut is None:
        yield part, []
        return
    dim = cut.dim
    begin = part.offset[dim]
    end = begin + part.tensor.shape[dim]
    ends = {min(max(at, begin), end) for span in cut.spans for at in span}
    for first, last in pairwise(sorted(ends | {begin, end})):
        offset = (*part.offset[:dim], first, *part.offset[dim + 1 :])
        owners = [index for index, (low, high) in enumerate(cut.spans) if low <= first and last <= high]
        yield (
            replace(part, offset=offset, tensor=part.tensor.narrow(dim, first - begin, last - first)),
            owners,
        )


def _copy_of(row: WeightRow) -> int:
    """The number of this rank among those that have the same boxes of a parameter."""
    if row.is_expert:
        return int(mpu.get_expert_data_parallel_rank())
    return int(mpu.get_data_parallel_rank(with_context_parallel=True))


def _part(local: LocalParameter, block: Block, span: RowSpan, height: int, *, is_given: bool) -> _Part:
    begin = block.first_row + span.begin - block.offset[0]
    return _Part(
        name=span.name,
        answers=_copy_of(local.row) == 0,
        is_given=is_given,
        shape=(height, *local.row.file_shape[1:]),
        offset=(span.first, *((0,) * len(local.row.tail) or block.offset[1:])),
        tensor=local.parameter.detach()[begin : begin + span.num_rows],
    )
