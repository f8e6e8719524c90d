"""Host copies of trainer ranks with cuts, and the packed slices that a node of an engine fetches of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from yatt.adapters.node_local.host_segment import (
    SegmentWriter,
    Stamp,
    aligned_size,
    segment_path,
    weight_plan_path,
)
from yatt.config.schema import (
    DataSection,
    LaunchSection,
    ModelSection,
    OptimizerSection,
    PlacementSection,
    RewardSection,
    RolloutSection,
    RunConfig,
    RunSection,
    TrainerSection,
)
from yatt.control.gpus.weights.given_segment import GivenSegment
from yatt.models.cuts import EngineCuts, cut_dim, engine_cuts, gives_weight
from yatt.models.model import Model
from yatt.models.rows import WeightRow
from yatt.models.spans import row_spans, spans_within
from yatt.records.weights import DTYPE_BYTES, PlannedWeight, WeightBox, WeightCut, WeightPlan
from yatt.weights.boxes import blocks_of


def packed_copy(stem: Path, target: Path, part: int, stamp: Stamp) -> None:
    """What a node with this part has of a rank's host copy after a fetch, at another path."""
    given = GivenSegment(stem, part)
    weight_plan_path(target).write_bytes(given.plan)
    writer = SegmentWriter(segment_path(target, "weights"), given.size_bytes)
    for begin in range(0, given.size_bytes, 1000):  # borders of blocks are anywhere
        end = min(begin + 1000, given.size_bytes)
        writer.data[begin:end] = given.block(begin, end)
    writer.complete(stamp)


def part_sums(tensors: Mapping[str, Any], cuts: Mapping[str, WeightCut]) -> dict[str, tuple[int, ...]]:
    """Checksums of the slices of each part, of whole tensors that are cut."""
    from yatt.weights.checksum import box_sum

    found = {}
    for name, cut in cuts.items():
        tensor, sums = tensors[name], []
        for begin, end in cut.spans:
            offset = [0] * tensor.dim()
            offset[cut.dim] = begin
            box = tensor.narrow(cut.dim, begin, end - begin)
            sums.append(box_sum(box, offset, tuple(tensor.shape)) if end > begin else 0)
        found[name] = tuple(sums)
    return found


def rank_plan(config: RunConfig, model: Model, rank: int, world_size: int) -> tuple[WeightPlan, int]:
    """The plan of a trainer rank's host copy, without the trainer, and the bytes of its segment."""
    section, cuts, at = config.trainer, engine_cuts(config, model.rows, model.shape), 0
    weights = []
    for row in rows_of_rank(config, model, rank, world_size):
        tp = section.expert_tp_size if row.is_expert else section.tensor_model_parallel_size
        is_given = gives_weight(row, rank, world_size, section)
        item = DTYPE_BYTES[dtype := "float32" if row.is_fixed else config.model.dtype]
        for name, boxes in boxes_of_rank(row, rank % tp, tp).items():
            placed = []
            for offset, shape in boxes:
                placed.append(WeightBox(offset=offset, shape=shape, at=at))
                at += aligned_size(math.prod(shape) * item)
            weights.append(_planned(row, name, dtype, placed, cuts, is_given=is_given))
    return WeightPlan(rank=rank, weights=tuple(weights)), at


def _planned(
    row: WeightRow, name: str, dtype: str, boxes: Sequence[WeightBox], cuts: EngineCuts, *, is_given: bool
) -> PlannedWeight:
    height = sum(span.num_rows for span in row_spans(row) if span.name == name)
    return PlannedWeight(
        name=name, dtype=dtype, shape=(height, *row.full_shape[1:]), boxes=tuple(boxes),
        cut=cuts.cuts.get(name), is_known=name not in cuts.unknown, is_given=is_given,
    )  # fmt: skip


def rows_of_rank(config: RunConfig, model: Model, rank: int, world_size: int) -> Iterable[WeightRow]:
    """Rows of which a rank of a layout without pipelines has something to give, in megatron-core's order."""
    section = config.trainer
    assert section.pipeline_model_parallel_size == 1
    etp, ep = section.expert_tp_size, section.expert_model_parallel_size
    for row in model.rows:
        tp_rank = rank % (etp if row.is_expert else section.tensor_model_parallel_size)
        if row.is_expert and model.shape.experts is not None:
            number = int(row.name.partition(".mlp.experts.")[2].partition(".")[0])
            if number // (model.shape.experts.num_experts // ep) != rank // etp % ep:
                continue
        if cut_dim(row) is not None or tp_rank == 0:
            yield row


def boxes_of_rank(row: WeightRow, rank: int, size: int) -> dict[str, list[tuple[tuple[int, ...], ...]]]:
    """Offset and shape of each box of Hugging Face tensors in a rank's part of a row."""
    found: dict[str, list[tuple[tuple[int, ...], ...]]] = {}
    for block in blocks_of(row, cut_dim(row) if size > 1 else None, rank=rank, size=size):
        first = block.offset[0]
        for span in spans_within(row_spans(row), first, first + block.shape[0]):
            box = (span.first, *block.offset[1:]), (span.num_rows, *block.shape[1:])
            found.setdefault(span.name, []).append(box)
    return found


def write_rank(stem: Path, plan: WeightPlan, size_bytes: int, tensors: Mapping[str, Any]) -> SegmentWriter:
    """A rank's host copy of these tensors; no version yet."""
    import torch

    weight_plan_path(stem).write_bytes(msgspec.msgpack.encode(plan))
    segment = SegmentWriter(segment_path(stem, "weights"), size_bytes)
    fill_rank(segment, plan, tensors)
    assert torch.is_tensor(next(iter(tensors.values())))
    return segment


def fill_rank(segment: SegmentWriter, plan: WeightPlan, tensors: Mapping[str, Any]) -> None:
    """Writes these tensors into a rank's segment."""
    import torch

    data = torch.frombuffer(segment.data, dtype=torch.uint8)
    for planned in plan.weights:
        for box in planned.boxes:
            places = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
            raw = tensors[planned.name][places].contiguous().view(-1).view(torch.uint8)
            data[box.at : box.at + len(raw)] = raw


def spanning_config(
    model: str,
    *,
    tp_size: int,
    node_ranks: int = 1,
    num_engines: int = 1,
    dtype: str = "float32",
    trainer: Mapping[str, Any] | None = None,
    **rollout: Any,
) -> RunConfig:
    """Engines of `tp_size` GPUs, `node_ranks` on a node, beside one node with trainer ranks.

    Args:
        trainer: settings of the section, and `ranks`.
    """
    section = dict(trainer or {})
    ranks = section.pop("ranks", 1)
    nodes = tp_size // node_ranks * num_engines
    return RunConfig(
        run=RunSection(dir="/r"), data=DataSection(train_files=("a",)),
        model=ModelSection(path=model, dtype=dtype), optimizer=OptimizerSection(lr=1e-6),
        trainer=TrainerSection(total_iterations=1, train_batch_size=1, mini_batch_size=1, **section),
        launch=LaunchSection(nodes=1 + nodes, gpus_per_node=ranks, engine_gpus_per_node=node_ranks),
        placement=PlacementSection(mode="disaggregated", trainer_nodes=1),
        rollout=RolloutSection(tp_size=tp_size, **rollout),
        rewards=(RewardSection(name="r", path="builtin:exact"),),
    )  # fmt: skip
