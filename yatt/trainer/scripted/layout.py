"""Where a scripted rank's tensors are: its share of the model, its segments, its pieces of a checkpoint."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from yatt.adapters.node_local.host_segment import STATE, WEIGHTS, aligned_size
from yatt.checkpoint.commit.pieces import ITEM_BYTES
from yatt.config.schema import TrainerSection
from yatt.models.cuts import EngineCuts
from yatt.models.rows import WeightRow
from yatt.models.spans import row_spans
from yatt.models.tensors import hf_shapes
from yatt.records.message import PlannedPiece
from yatt.records.weights import PlannedWeight, WeightBox
from yatt.trainer.scripted.state import MAIN, MODEL, MOMENTS

PIECE_BYTES = 16 << 20
"""Most bytes of a piece of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementRun:
    """Consecutive elements of a flattened tensor at byte `at` of a segment."""

    key: str
    dtype: str
    first: int
    count: int
    at: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return self.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What one rank has: rank `copy` of `num_copies` that share the rows of part `part` of `num_parts`.

    The parts of a model are dealt out row by row, whatever the real trainer would cut; the copies divide each
    row's state, as a distributed optimizer does. `is_given` is as in PlannedWeight.
    """

    part: int
    num_parts: int
    copy: int
    num_copies: int
    is_given: bool = True

    @classmethod
    def of(cls, rank: int, world_size: int, section: TrainerSection) -> "ModelShare":
        """Returns the share of a rank, in megatron-core's order: tensor, then data, then pipeline."""
        tensor, pipeline = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
        stage, within = divmod(rank, world_size // pipeline)
        copy, column = divmod(within, tensor)
        return cls(
            stage * tensor + column,
            tensor * pipeline,
            copy,
            world_size // pipeline // tensor,
            is_given=within % section.whole_stage < tensor,
        )

    def rows(self, rows: Sequence[WeightRow]) -> list[WeightRow]:
        """Returns the rows of this part."""
        return [row for index, row in enumerate(rows) if index % self.num_parts == self.part]

    def range_of(self, row: WeightRow) -> tuple[int, int]:
        """Returns begin and end of the flattened elements whose state this copy has."""
        size = math.prod(row.full_shape)
        return size * self.copy // self.num_copies, size * (self.copy + 1) // self.num_copies


def pieces_of(row: WeightRow, run: ElementRun, area: str) -> Iterator[PlannedPiece]:
    """Yields a run of a row's elements as boxes of the row, each of at most `PIECE_BYTES`."""
    width = row.width or 1
    item = ITEM_BYTES[run.dtype]
    at, end = run.first, run.first + run.count
    while at < end:
        line, column = divmod(at, width)
        most = max(1, PIECE_BYTES // (width * item))
        if column or end - at < width:
            shape = (1, min(width - column, end - at))
        else:
            shape = (min((end - at) // width, most), width)
        yield PlannedPiece(
            key=run.key,
            dtype=run.dtype,
            global_shape=row.full_shape,
            global_offset=(line, column) if row.width else (line,),
            local_shape=shape if row.width else shape[:1],
            area=area,
            at=run.at + (at - run.first) * item,
            size_bytes=math.prod(shape) * item,
        )
        at += math.prod(shape)


def laid_out(
    rows: list[WeightRow], share: ModelShare, dtype: str, cuts: EngineCuts
) -> tuple[dict[str, list[ElementRun]], list[PlannedPiece], list[PlannedWeight]]:
    """Returns the runs of each segment, the pieces that this rank saves, and the weights that engines load.

    As in the real trainer, main copies in float32 are the weights themselves.
    """
    runs: dict[str, list[ElementRun]] = {WEIGHTS: [], STATE: []}
    pieces, weights = list[PlannedPiece](), list[PlannedWeight]()
    ends = {WEIGHTS: 0, STATE: 0}

    def placed(area: str, key: str, dtype: str, first: int, count: int) -> ElementRun:
        run = ElementRun(key=key, dtype=dtype, first=first, count=count, at=ends[area])
        ends[area] = aligned_size(run.at + run.size_bytes)
        runs[area].append(run)
        return run

    for row in rows:
        begin, end = share.range_of(row)
        kind = MODEL if dtype != "float32" else MAIN
        whole = placed(WEIGHTS, f"{kind}.{row.name}", dtype, 0, math.prod(row.full_shape))
        weights += [
            msgspec.structs.replace(
                planned,
                cut=cuts.cuts.get(planned.name),
                is_known=planned.name not in cuts.unknown,
                is_given=share.is_given,
            )
            for planned in _boxes(row, whole, ITEM_BYTES[dtype])
        ]
        if begin == end:
            continue
        at = whole.at + begin * ITEM_BYTES[dtype]
        own = ElementRun(key=whole.key, dtype=dtype, first=begin, count=end - begin, at=at)
        pieces += pieces_of(row, own, WEIGHTS)
        for name in (*(() if kind == MAIN else (MAIN,)), *MOMENTS):
            run = placed(STATE, f"{name}.{row.name}", "float32", begin, end - begin)
            pieces += pieces_of(row, run, STATE)
    return runs, pieces, weights


def _boxes(row: WeightRow, whole: ElementRun, item: int) -> Iterator[PlannedWeight]:
    """The Hugging Face tensors that are in a whole row."""
    width = row.width or 1
    for name, shape in hf_shapes(row).items():
        boxes = tuple(
            WeightBox(
                offset=(span.first, *(0,) * (len(shape) - 1)),
                shape=(span.num_rows, *shape[1:]),
                at=whole.at + span.begin * width * item,
            )
            for span in row_spans(row)
            if span.name == name
        )
        yield PlannedWeight(name=name, dtype=whole.dtype, shape=shape, boxes=boxes)
