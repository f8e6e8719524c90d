"""How tensor parallelism cuts a model's parameters: the trainer's ranks, and the nodes of an engine.

An engine that spans nodes has consecutive ranks on each of them, so a node's ranks have one range of a
tensor's rows or columns together. Where vLLM's cut does not follow from the weight table (a tower; several
parts in one tensor; a family of the user's own; sizes that do not divide), it is *unknown*, and a node needs
the whole tensor. Sources: vLLM 0.26 to 0.33, `QKVParallelLinear`, `VocabParallelEmbedding`, `RoutedExperts`,
`determine_expert_map`; of norms over all heads `MiniMaxText01RMSNormTP` and the backend that runs classes of
transformers (OLMo).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from yatt.config.schema import RunConfig, TrainerSection
from yatt.config.sizes import engine_spans
from yatt.models.rows import HEADS_NORM, SCORE, WeightRow
from yatt.models.shape import Attention, GroupedAttention, Shape
from yatt.records.weights import WeightCut

BY_COLUMNS = ("self_attention.linear_proj.weight", "linear_fc2.weight")
BY_ROWS = (
    "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_q_proj.weight",
    "linear_q_up_proj.weight", "linear_kv_up_proj.weight", "word_embeddings.weight", "output_layer.weight",
    HEADS_NORM,
)  # fmt: skip

VOCABULARY_ROWS = 64
"""vLLM pads vocabularies to a multiple of it."""


def cut_dim(row: WeightRow) -> int | None:
    """The dimension that tensor parallelism cuts, by megatron-core's kinds of layers."""
    if row.is_tower or row.hf_names == (SCORE,):
        return None
    if row.name.endswith(BY_COLUMNS):
        return 1
    return 0 if row.name.endswith(BY_ROWS) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSplit:
    """An engine of `tp_size` ranks on `num_nodes` consecutive nodes, as many on each.

    Args:
        expert_parallel: each rank has some experts whole, instead of a part of each.
    """

    tp_size: int
    num_nodes: int
    expert_parallel: bool = False

    @property
    def node_ranks(self) -> int:
        """Ranks of one node."""
        return self.tp_size // self.num_nodes


def engine_split(config: RunConfig) -> EngineSplit | None:
    """Returns how rollout engines are spread over nodes that fetch slices of weights; None: a node fetches
    whole tensors, because its engines have the whole model, or because the run file says so."""
    num_nodes = engine_spans(config)["rollout"]
    if num_nodes == 1 or not config.placement.send_slices:
        return None
    section = config.rollout
    return EngineSplit(tp_size=section.tp_size, num_nodes=num_nodes, expert_parallel=section.expert_parallel)


@dataclass(frozen=True, slots=True)
class EngineCuts:
    """Cuts of Hugging Face tensors, by name. Of a tensor that is in neither, each rank has all.

    Args:
        unknown: tensors whose cut is not known.
    """

    cuts: dict[str, WeightCut]
    unknown: frozenset[str]


def engine_cuts(config: RunConfig, rows: Iterable[WeightRow], shape: Shape) -> EngineCuts:
    """Returns how the nodes of a rollout engine cut the tensors of a model; nothing if it is on one node."""
    cuts, unknown = dict[str, WeightCut](), set[str]()
    if (split := engine_split(config)) is None:
        return EngineCuts(cuts, frozenset())
    for row in rows:
        if config.model.family or row.is_tower or len(row.hf_names) < len(row.parts):
            unknown.update(row.hf_names)
            continue
        if row.is_expert and split.expert_parallel:
            found: list[WeightCut | None] = [_expert_cut(row, shape, split)] * len(row.parts)
        elif (dim := cut_dim(row)) is None or row.name.endswith(HEADS_NORM):
            continue  # a norm over all heads is whole in some of vLLM's classes, and small
        else:
            found = _cuts(row, dim, shape.attention, split)
        for part, cut in zip(row.parts, found, strict=True):
            if cut is None:
                unknown.add(part.name)
            else:
                cuts[part.name] = cut
    return EngineCuts(cuts, frozenset(unknown))


def gives_weight(row: WeightRow, rank: int, world_size: int, section: TrainerSection) -> bool:
    """Whether nodes that fetch slices get a parameter from this rank. They fetch from one rank for each place
    in a stage (`Placement.weight_ranks`); what several places have, the first ones give."""
    place = rank % (world_size // section.pipeline_model_parallel_size) % section.whole_stage
    if row.is_expert:
        return place < section.expert_tp_size * section.expert_model_parallel_size
    return place < section.tensor_model_parallel_size


def _cuts(row: WeightRow, dim: int, attention: Attention, split: EngineSplit) -> list[WeightCut | None]:
    """The cut of each part of a row."""
    if dim == 1:
        return [_even_cut(1, row.width, split)] * len(row.parts)
    if row.is_padded:
        return [_vocabulary_cut(row.num_rows, split)]
    if ".linear_qkv." in row.name:
        heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        if len(row.parts) != len(heads) or _is_cut_otherwise(attention, split):
            return [None] * len(row.parts)
        return [
            _head_cut(part.num_rows, number, split) for part, number in zip(row.parts, heads, strict=True)
        ]
    return [_even_cut(0, part.num_rows, split) for part in row.parts]


def _is_cut_otherwise(attention: Attention, split: EngineSplit) -> bool:
    """Whether ranks have parts of a key's head in some of vLLM's classes with norms over all heads, and a
    whole one in the others."""
    has_norm = isinstance(attention, GroupedAttention) and attention.norms_all_heads
    return has_norm and attention.num_kv_heads < split.tp_size


def _even_cut(dim: int, size: int, split: EngineSplit) -> WeightCut | None:
    if size % split.tp_size:
        return None
    each = size // split.num_nodes
    return WeightCut(dim=dim, spans=tuple((at * each, (at + 1) * each) for at in range(split.num_nodes)))


def _head_cut(num_rows: int, heads: int, split: EngineSplit) -> WeightCut | None:
    """Each rank has as many heads as the others; if there are fewer heads than ranks, several ranks that
    follow one another have the same one."""
    if num_rows % heads or (heads % split.tp_size and split.tp_size % heads):
        return None
    head, spans = num_rows // heads, list[tuple[int, int]]()
    for node in range(split.num_nodes):
        first, last = node * split.node_ranks, (node + 1) * split.node_ranks - 1
        begin = first * heads // split.tp_size
        end = last * heads // split.tp_size + max(heads // split.tp_size, 1)
        spans.append((begin * head, end * head))
    return WeightCut(dim=0, spans=tuple(spans))


def _vocabulary_cut(num_rows: int, split: EngineSplit) -> WeightCut | None:
    padded = -(-num_rows // VOCABULARY_ROWS) * VOCABULARY_ROWS
    if (whole := _even_cut(0, padded, split)) is None:
        return None
    spans = tuple((min(begin, num_rows), min(end, num_rows)) for begin, end in whole.spans)
    return WeightCut(dim=0, spans=spans)


def _expert_cut(row: WeightRow, shape: Shape, split: EngineSplit) -> WeightCut | None:
    """Experts are dealt in order; the first ranks have one more if they do not divide."""
    if shape.experts is None:
        return None
    each, more = divmod(shape.experts.num_experts, split.tp_size)
    number = int(row.name.partition(".mlp.experts.")[2].partition(".")[0])
    ends = [rank * each + min(rank, more) for rank in range(0, split.tp_size + 1, split.node_ranks)]
    rows = row.parts[0].num_rows
    return WeightCut(
        dim=0, spans=tuple((0, rows if begin <= number < end else 0) for begin, end in pairwise(ends))
    )
