"""Elements of the parameters of one rank, and of the flat buffers in which megatron-core keeps them.

The rows come from the model's weight table, so any family is counted. Source of the padding:
megatron-core's `_ParamAndGradBuffer` with a distributed optimizer.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from yatt.models.rows import EMBEDDING, OUTPUT, WeightRow
from yatt.planning.ranks import RankLayout

BY_COLUMNS = ("self_attention.linear_proj.weight", "linear_fc2.weight")
BY_ROWS = (
    "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_q_proj.weight",
    "linear_q_up_proj.weight", "linear_kv_up_proj.weight", "word_embeddings.weight", "output_layer.weight",
)  # fmt: skip
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
ALIGN, BUCKET_ALIGN = 64, 128
"""Elements to which parameters are aligned in their buffer, and buckets, which are divided over ranks too."""


def cut_dim(row: WeightRow) -> int | None:
    """The dimension that tensor parallelism cuts, by megatron-core's kinds of layers."""
    if row.name.endswith(BY_COLUMNS):
        return 1
    return 0 if row.name.endswith(BY_ROWS) else None


def is_expert(row: WeightRow) -> bool:
    """Whether the parameter belongs to one of the routed experts."""
    return _EXPERT.search(row.name) is not None


def local_numel(row: WeightRow, layout: RankLayout) -> int:
    """Elements of a parameter on one rank that has it, vocabulary padding included."""
    shape, dim = list(row.full_shape), cut_dim(row)
    parts = layout.etp if is_expert(row) else layout.tp
    if row.is_padded:
        shape[0] += -shape[0] % layout.tp
    numel = math.prod(shape)
    return numel if dim is None else numel // parts


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Elements of a rank's flat buffers, `numel`; and `state` of them, without padding, whose optimizer state
    a rank has: the mean over ranks, which differ by less than one parameter's padding."""

    numel: int = 0
    state: int = 0

    def __add__(self, other: "BufferSizes") -> "BufferSizes":
        return BufferSizes(self.numel + other.numel, self.state + other.state)


def chunk_buffers(rows: Iterable[WeightRow], layout: RankLayout, *, has_copy: bool) -> BufferSizes:
    """Sizes of the buffers of one model chunk.

    Args:
        rows: its parameters; of experts all of them, of which this rank has one part in EP.
        has_copy: the embedding has a copy on another stage (tied, with pipelines), and a bucket of its own.
    """
    dense, shared, experts = list[int](), list[int](), list[int]()
    for row in rows:
        numel = local_numel(row, layout)
        if is_expert(row) and layout.ep > 1:
            experts.append(numel)
        else:
            (shared if has_copy and row.name == EMBEDDING else dense).append(numel)
    flat = sum(_bucket(sizes, 1, layout.state_shards) for sizes in (dense, shared))
    numel = flat + _bucket(experts, layout.ep, layout.expert_shards)
    state = (sum(dense) + sum(shared)) / layout.state_shards + sum(experts) / layout.ep / layout.expert_shards
    return BufferSizes(numel, math.ceil(state))


def _bucket(sizes: list[int], parts: int, shards: int) -> int:
    """Elements of a bucket with one of `parts` equal parts of these parameters."""
    total = sum(_padded(size, ALIGN) for size in sizes) // parts
    return _padded(total, math.lcm(shards, BUCKET_ALIGN))


def _padded(number: int, multiple: int) -> int:
    return number + -number % multiple


def rows_of_chunk(
    rows: Iterable[WeightRow], layers: range, *, is_first: bool, is_last: bool, is_tied: bool
) -> list[WeightRow]:
    """The rows of a chunk with these layers. The first has the embedding, the last the last norm and head."""
    found = []
    for row in rows:
        if row.name == EMBEDDING:
            is_here = is_first or (is_last and is_tied)
        elif row.name == OUTPUT or "final_layernorm" in row.name:
            is_here = is_last
        else:
            is_here = int(row.name.split(".")[2]) in layers
        if is_here:
            found.append(row)
    return found
