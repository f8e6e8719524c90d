"""Elements of the parameters of one rank, and of the flat buffers in which megatron-core keeps them.

The rows come from the model's weight table, so any family is counted. Source of the padding:
megatron-core's `_ParamAndGradBuffer` with a distributed optimizer.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from yatt.forecast.memory.ranks import RankLayout
from yatt.models.cuts import cut_dim
from yatt.models.model import Model
from yatt.models.rows import EMBEDDING, OUTPUT, WeightRow
from yatt.models.towers.tower import trains_parameter

ALIGN, BUCKET_ALIGN = 64, 128
"""Elements to which parameters are aligned in their buffer, and buckets, which are divided over ranks too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterKind:
    """What the size of a parameter on a rank depends on."""

    num_rows: int
    width: int
    is_cut: bool
    is_expert: bool
    is_padded: bool
    is_embedding: bool

    def numel(self, layout: RankLayout) -> int:
        """Elements on one rank that has it, vocabulary padding included."""
        parts = layout.etp if self.is_expert else layout.tp
        num_rows = self.num_rows + (-self.num_rows % layout.tp if self.is_padded else 0)
        return num_rows * (self.width or 1) // (parts if self.is_cut else 1)


Kinds = Mapping[ParameterKind, int]
"""Number of parameters of each kind."""


def parameter_kind(row: WeightRow) -> ParameterKind:
    """The kind of a row's parameter."""
    return ParameterKind(
        num_rows=row.num_rows,
        width=row.width,
        is_cut=cut_dim(row) is not None,
        is_expert=row.is_expert,
        is_padded=row.is_padded,
        is_embedding=row.name == EMBEDDING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTable:
    """A model's parameters by kind: made once, because a mixture of experts has tens of thousands.

    Args:
        first: the embedding. last: the last norm and the head. layers: those of each layer.
        tower: what is trained of a tower. num_frozen: elements of what is not.
    """

    first: Kinds
    last: Kinds
    layers: tuple[Kinds, ...]
    tower: Kinds
    num_frozen: int = 0

    def chunk(self, layers: range, *, is_tied: bool) -> Counter[ParameterKind]:
        """The parameters of a model chunk with these layers. If embedding and head are tied, a last chunk
        that is not the first has a copy of the embedding."""
        is_first, is_last = layers.start == 0, layers.stop == len(self.layers)
        found = Counter[ParameterKind]()
        for index in layers:
            found.update(self.layers[index])
        if is_first or (is_last and is_tied):
            found.update(self.first)
        if is_first:
            found.update(self.tower)
        if is_last:
            found.update(self.last)
        return found


def table_of(model: Model, trained: str = "none") -> ParameterTable:
    """The table of a model.

    Args:
        trained: `vision.train`.
    """
    first, last, tower = Counter[ParameterKind](), Counter[ParameterKind](), Counter[ParameterKind]()
    num_frozen = 0
    layers = [Counter[ParameterKind]() for _ in model.shape.layers]
    for row in model.rows:
        if row.is_fixed:  # neither trained nor in the flat buffers
            continue
        if row.is_tower and not trains_parameter(row.name, trained):
            num_frozen += row.num_rows * (row.width or 1)
            continue
        if row.is_tower:
            place = tower
        elif row.name == EMBEDDING:
            place = first
        elif row.name == OUTPUT or "final_layernorm" in row.name:
            place = last
        else:
            place = layers[int(row.name.split(".")[2])]
        place[parameter_kind(row)] += 1
    return ParameterTable(first=first, last=last, layers=tuple(layers), tower=tower, num_frozen=num_frozen)


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Elements of a rank's flat buffers, `numel`; and `state` of them, without padding, whose optimizer state
    a rank has: the mean over ranks, which differ by less than one parameter's padding."""

    numel: int = 0
    state: int = 0

    def __add__(self, other: "BufferSizes") -> "BufferSizes":
        return BufferSizes(self.numel + other.numel, self.state + other.state)


def chunk_buffers(kinds: Kinds, layout: RankLayout, *, has_copy: bool) -> BufferSizes:
    """Sizes of the buffers of one model chunk.

    Args:
        kinds: its parameters; of experts all of them, of which this rank has one part in EP.
        has_copy: the embedding has a copy on another stage (tied, with pipelines), and a bucket of its own.
    """
    dense, shared, experts = _Bucket(), _Bucket(), _Bucket()
    for kind, count in kinds.items():
        if kind.is_expert and layout.ep > 1:
            experts.add(kind.numel(layout), count / layout.ep)
        else:
            (shared if has_copy and kind.is_embedding else dense).add(kind.numel(layout), count)
    flat = sum(bucket.flat(layout.state_shards) for bucket in (dense, shared))
    state = (dense.numel + shared.numel) / layout.state_shards + experts.numel / layout.expert_shards
    return BufferSizes(flat + experts.flat(layout.expert_shards), math.ceil(state))


class _Bucket:
    """Parameters that are together in a flat buffer."""

    def __init__(self) -> None:
        self.numel = self._aligned = 0.0

    def add(self, numel: int, count: float) -> None:
        """Adds parameters of the same size."""
        self.numel += count * numel
        self._aligned += count * (numel + -numel % ALIGN)

    def flat(self, shards: int) -> int:
        """Elements with padding."""
        total = math.ceil(self._aligned)
        return total + -total % math.lcm(shards, BUCKET_ALIGN)
