"""Bytes of weights that a node fetches from a trainer rank, counted as they are packed.

A node of an engine that spans several fetches slices: the boxes that the rank has, cut to what the node's
ranks need (`yatt.weights.slices`). A model has few kinds of parameters, so each kind is counted once.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from yatt.adapters.node_local.host_segment import aligned_size
from yatt.config.schema import RunConfig
from yatt.forecast.memory.ranks import model_chunks
from yatt.models.cuts import EngineCuts, cut_dim, engine_cuts, engine_split
from yatt.models.model import Model
from yatt.models.rows import EMBEDDING, OUTPUT, WeightRow
from yatt.models.spans import row_spans, spans_within
from yatt.records.weights import DTYPE_BYTES, WeightCut
from yatt.weights.boxes import blocks_of
from yatt.weights.slices import common_extent, part_extent

Place = tuple[int, int, int]
"""Pipeline stage, place in the stage, and part."""


@dataclass(frozen=True, slots=True)
class SliceSizes:
    """Bytes of slices that nodes fetch, by pipeline stage, place in it and part; `unknown` of these are of
    tensors whose cut is not known."""

    total: Counter[Place]
    unknown: Counter[Place]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the bytes of a parameter's boxes on a rank depend on."""

    row: tuple[tuple[int, ...], int, int, bool, tuple[tuple[int, int], ...]]
    cuts: tuple[WeightCut | None, ...]
    dim: int | None
    item: int


def slice_sizes(config: RunConfig, model: Model) -> SliceSizes | None:
    """Returns the bytes of each part's slices; None if nodes fetch whole tensors."""
    if (split := engine_split(config)) is None:
        return None
    found = SliceSizes(Counter(), Counter())
    cuts, stages = engine_cuts(config, model.rows, model.shape), _stages(config, model)
    known: dict[tuple[_Kind, int, int], list[int]] = {}
    for row in model.rows:
        kind = _kind_of(config, row, cuts)
        is_unknown = not cuts.unknown.isdisjoint(row.hf_names)
        for place, rank, size in _givers(config, row, model):
            key = kind, rank, size
            if key not in known:
                known[key] = [
                    _packed_bytes(row, kind, cuts, key[1:], part) for part in range(split.num_nodes)
                ]
            for part, size_bytes in enumerate(known[key]):
                at = stages[_layer_of(row, model)], place, part
                found.total[at] += size_bytes
                found.unknown[at] += size_bytes if is_unknown else 0
    return found


def _kind_of(config: RunConfig, row: WeightRow, cuts: EngineCuts) -> _Kind:
    numbers = {name: index for index, name in enumerate(row.hf_names)}
    parts = tuple((numbers[part.name], part.num_rows) for part in row.parts)
    about = (row.file_shape, row.width, row.groups, row.is_padded, parts)
    item = DTYPE_BYTES["float32" if row.is_fixed else config.model.dtype]
    return _Kind(about, tuple(cuts.cuts.get(name) for name in row.hf_names), cut_dim(row), item)


def _givers(config: RunConfig, row: WeightRow, model: Model) -> Iterator[tuple[int, int, int]]:
    """Yields the places of a stage that give a parameter; of each, which share of how many it has. What is
    not cut, the first of them gives; see `yatt.models.cuts.gives_weight`."""
    section, first = config.trainer, 0
    size = section.tensor_model_parallel_size
    if row.is_expert:
        size = section.expert_tp_size
        assert model.shape.experts is not None, "a row of an expert"
        each = model.shape.experts.num_experts // section.expert_model_parallel_size
        first = int(row.name.partition(".mlp.experts.")[2].partition(".")[0]) // each * size
    if cut_dim(row) is None:
        yield first, 0, 1
        return
    for rank in range(size):
        yield first + rank, rank, size


def _packed_bytes(row: WeightRow, kind: _Kind, cuts: EngineCuts, share: tuple[int, int], part: int) -> int:
    """Bytes of what one part needs of the boxes that a rank has of a parameter."""
    spans, total = row_spans(row), 0
    heights = Counter[str]()
    for span in spans:
        heights[span.name] += span.num_rows
    rank, size = share
    for block in blocks_of(row, kind.dim, rank=rank, size=size):
        first, tail = block.offset[0], block.offset[1:]
        for span in spans_within(spans, first, first + block.shape[0]):
            box = (span.first, *tail), (span.num_rows, *block.shape[1:])
            wanted = part_extent((heights[span.name], *row.full_shape[1:]), cuts.cuts.get(span.name), part)
            if (common := common_extent(box, wanted)) is not None:
                total += aligned_size(math.prod(common[1]) * kind.item)
    return total


def _stages(config: RunConfig, model: Model) -> dict[int, int]:
    """Maps each layer to its pipeline stage; -1: what is before the layers, `num_layers`: what is after."""
    num_layers, last = model.shape.num_layers, config.trainer.pipeline_model_parallel_size - 1
    stages = {-1: 0, num_layers: last}
    for stage in range(last + 1):
        for chunk in model_chunks(num_layers, config.trainer, stage):
            stages.update(dict.fromkeys(chunk, stage))
    return stages


def _layer_of(row: WeightRow, model: Model) -> int:
    if row.is_tower or row.name == EMBEDDING:
        return -1
    if row.name == OUTPUT or "final_layernorm" in row.name:
        return model.shape.num_layers
    return int(row.name.split(".")[2])
