"""The weight table of a model: which Hugging Face tensors form each megatron-core parameter.

A row lists parts: consecutive rows of Hugging Face tensors. The parameter is made of `groups` blocks, each
with the same share of every part. So one group is all parts in sequence (gate and up), and one group per
key/value head is megatron-core's order of queries, keys and values. Tensor parallelism cuts each part alike;
along which dimension is read off the parameter (`yatt.weights.convert`).

Names of parameters are Transformer Engine's; layers and experts are numbered from 0 over the whole model
(``mlp.experts.7.linear_fc1.weight``).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from yatt.models.shape import DenseFeedForward, Experts, GroupedAttention, LatentAttention, Shape

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
SCORE = "score.weight"
"""The value head of a model folder, as transformers names it: one row."""

HEADS_NORM = "_layernorm.heads_weight"
"""Ends the names of the norms over all heads of queries and of keys, which are cut as the heads are."""

ROUTER_BIAS = "mlp.router.expert_bias"
"""In a layer: the only weight that is not trained; megatron-core keeps it in a buffer."""

VISION = "vision."
"""Begins the names of a tower's parameters."""


@dataclass(frozen=True, slots=True)
class Part:
    """The next `num_rows` rows of the Hugging Face tensor `name`; a later part takes the rows after them."""

    name: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class Stacked:
    """A block of a tensor of files that has the matrices of a layer's `count` experts, each transposed:
    `name` is [count, columns, rows]."""

    name: str
    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRow:
    """One parameter.

    Args:
        name: of the parameter in megatron-core.
        width: columns; 0 for a vector.
        groups: blocks in which the parts are interleaved.
        is_padded: the number of rows is padded to a multiple of the tensor-parallel size.
        tail: sizes of the tensor in files after the first, where they are more than one (a convolution);
            their product is `width`.
        stacked: where files have it; None: in the tensors that its parts name, which engines always read.
    """

    name: str
    parts: tuple[Part, ...]
    width: int = 0
    groups: int = 1
    is_padded: bool = False
    tail: tuple[int, ...] = ()
    stacked: Stacked | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the whole parameter, without padding."""
        return sum(part.num_rows for part in self.parts)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, without padding."""
        return (self.num_rows, self.width) if self.width else (self.num_rows,)

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter as engines read it, without padding."""
        return (self.num_rows, *self.tail) if self.tail else self.full_shape

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one expert of a mixture, and so is on a part of the ranks (EP)."""
        return ".mlp.experts." in self.name

    @property
    def is_tower(self) -> bool:
        """Whether it belongs to the tower before the decoder, and so is whole on each rank that has it."""
        return self.name.startswith(VISION)

    @property
    def is_fixed(self) -> bool:
        """Whether it is not trained, and in float32 whatever the model's dtype is: a router's bias."""
        return self.name.endswith(ROUTER_BIAS)

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Hugging Face tensors of which it is made, each once."""
        return tuple(dict.fromkeys(part.name for part in self.parts))


def vector_row(name: str, hf_name: str, size: int) -> WeightRow:
    """A norm's weight: the same tensor on both sides."""
    return WeightRow(name=name, parts=(Part(hf_name, size),))


def matrix_row(name: str, parts: Iterable[Part], width: int, groups: int = 1) -> WeightRow:
    """A matrix of some parts."""
    return WeightRow(name=name, parts=tuple(parts), width=width, groups=groups)


def vocabulary_row(name: str, hf_name: str, shape: Shape) -> WeightRow:
    """An embedding or output matrix."""
    part = Part(hf_name, shape.vocab_size)
    return WeightRow(name=name, parts=(part,), width=shape.hidden_size, is_padded=True)


def decoder_table(shape: Shape, layers: Iterable[WeightRow]) -> list[WeightRow]:
    """The whole table, in the order in which weights are exported.

    With tied embeddings there is no output matrix, because it is the embedding.
    """
    table = [vocabulary_row(EMBEDDING, "model.embed_tokens.weight", shape), *layers]
    table.append(vector_row("decoder.final_layernorm.weight", "model.norm.weight", shape.hidden_size))
    return table if shape.is_tied else [*table, vocabulary_row(OUTPUT, "lm_head.weight", shape)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Hugging Face names within `model.layers.N.`, with one name for each of query, key, value, or one name
    for all three; likewise gate and up. Norms are those of the two halves, before or after them. Defaults are
    Llama's."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    output: str = "self_attn.o_proj"
    down: str = "mlp.down_proj"
    input_norm: str = "input_layernorm"
    ffn_norm: str = "post_attention_layernorm"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    """Of each expert, before its number; gate, up and down have the last parts of `gate_up` and `down`."""

    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


def layer_rows(shape: Shape, names: LayerNames | None = None) -> list[WeightRow]:
    """The rows of all layers."""
    chosen, table = names or LayerNames(), list[WeightRow]()
    for index, layer in enumerate(shape.layers):
        if isinstance(layer.attention, LatentAttention):
            table += _latent_attention(shape, layer.attention, chosen, index)
        else:
            table += _attention(shape, layer.attention, chosen, index)
        if isinstance(layer.feed_forward, Experts):
            table += _experts(shape, layer.feed_forward, chosen, index)
        else:
            table += _feed_forward(shape, layer.feed_forward, chosen, index)
    return table


def _parts(prefix: str, names: tuple[str, ...], sizes: list[int], leaf: str) -> list[Part]:
    """One part per size; with a single name all of them are parts of that tensor."""
    every = names * len(sizes) if len(names) == 1 else names
    return [Part(f"{prefix}{name}.{leaf}", size) for name, size in zip(every, sizes, strict=True)]


def _attention(shape: Shape, attention: GroupedAttention, names: LayerNames, index: int) -> list[WeightRow]:
    mcore, hf = f"decoder.layers.{index}.self_attention.", f"model.layers.{index}."
    head, kv = attention.head_dim, attention.num_kv_heads
    sizes = [attention.num_heads * head, kv * head, kv * head]
    normed = "linear_proj" if shape.layers[index].norms_after else "linear_qkv"
    table = [
        vector_row(f"{mcore}{normed}.layer_norm_weight", f"{hf}{names.input_norm}.weight", shape.hidden_size),
        matrix_row(
            mcore + "linear_qkv.weight", _parts(hf, names.qkv, sizes, "weight"), shape.hidden_size, kv
        ),
    ]
    if attention.has_qkv_bias:
        table.append(matrix_row(mcore + "linear_qkv.bias", _parts(hf, names.qkv, sizes, "bias"), 0, kv))
    if attention.has_qk_norm:
        leaf, widths = HEADS_NORM if attention.norms_all_heads else "_layernorm.weight", (head, head)
        widths = (sizes[0], sizes[1]) if attention.norms_all_heads else widths
        table.append(vector_row(f"{mcore}q{leaf}", f"{hf}{names.q_norm}.weight", widths[0]))
        table.append(vector_row(f"{mcore}k{leaf}", f"{hf}{names.k_norm}.weight", widths[1]))
    output = Part(f"{hf}{names.output}.weight", shape.hidden_size)
    return [*table, matrix_row(mcore + "linear_proj.weight", [output], sizes[0])]


def _latent_attention(
    shape: Shape, attention: LatentAttention, names: LayerNames, index: int
) -> list[WeightRow]:
    """Rows with DeepSeek's names; the norms of the two vectors are part of the matrices after them."""
    layer, hf, hidden = f"decoder.layers.{index}.", f"model.layers.{index}.", shape.hidden_size
    mcore, own = layer + "self_attention.", hf + "self_attn."
    q_rank, kv_rank, heads = attention.q_rank, attention.kv_rank, attention.num_heads

    def whole(name: str, hf_name: str, num_rows: int, width: int) -> WeightRow:
        return matrix_row(f"{mcore}{name}.weight", [Part(f"{own}{hf_name}.weight", num_rows)], width)

    def norm(name: str, hf_name: str, size: int) -> WeightRow:
        return vector_row(f"{mcore}{name}.layer_norm_weight", f"{own}{hf_name}.weight", size)

    table = [vector_row(layer + "input_layernorm.weight", f"{hf}{names.input_norm}.weight", hidden)]
    if q_rank:
        table += [
            whole("linear_q_down_proj", "q_a_proj", q_rank, hidden),
            norm("linear_q_up_proj", "q_a_layernorm", q_rank),
            whole("linear_q_up_proj", "q_b_proj", heads * attention.head_dim, q_rank),
        ]
    else:
        table.append(whole("linear_q_proj", "q_proj", heads * attention.head_dim, hidden))
    return [
        *table,
        whole("linear_kv_down_proj", "kv_a_proj_with_mqa", kv_rank + attention.rope_dim, hidden),
        norm("linear_kv_up_proj", "kv_a_layernorm", kv_rank),
        whole("linear_kv_up_proj", "kv_b_proj", heads * (attention.nope_dim + attention.value_dim), kv_rank),
        whole("linear_proj", "o_proj", hidden, heads * attention.value_dim),
    ]


def _feed_forward(shape: Shape, dense: DenseFeedForward, names: LayerNames, index: int) -> list[WeightRow]:
    mcore, hf = f"decoder.layers.{index}.mlp.", f"model.layers.{index}."
    normed = "linear_fc2" if shape.layers[index].norms_after else "linear_fc1"
    norm = vector_row(f"{mcore}{normed}.layer_norm_weight", f"{hf}{names.ffn_norm}.weight", shape.hidden_size)
    gate_up = tuple(hf + name for name in names.gate_up)
    return [norm, *_swiglu(mcore, gate_up, hf + names.down, dense.size, shape.hidden_size)]


def _experts(shape: Shape, experts: Experts, names: LayerNames, index: int) -> list[WeightRow]:
    """Rows of the router, the shared expert, and each expert, numbered over the whole model."""
    layer, hf = f"decoder.layers.{index}.", f"model.layers.{index}."
    hidden, leaves = shape.hidden_size, tuple(name.rpartition(".")[2] for name in names.gate_up)
    down = names.down.rpartition(".")[2]
    table = [
        vector_row(layer + "pre_mlp_layernorm.weight", f"{hf}{names.ffn_norm}.weight", hidden),
        matrix_row(
            layer + "mlp.router.weight", [Part(f"{hf}{names.router}.weight", experts.num_experts)], hidden
        ),
    ]
    if experts.sigmoid:
        table.append(vector_row(layer + ROUTER_BIAS, f"{hf}{names.router_bias}", experts.num_experts))
    if experts.shared_size:
        mcore, shared = layer + "mlp.shared_experts.", f"{hf}{names.shared}."
        gate_up = tuple(shared + leaf for leaf in leaves)
        table += _swiglu(mcore, gate_up, shared + down, experts.shared_size, hidden)
    if experts.has_shared_gate:
        gate = [Part(f"{hf}{names.shared_gate}.weight", 1)]
        table.append(matrix_row(layer + "mlp.shared_experts.gate_weight", gate, hidden))
    for number in range(experts.num_experts):
        mcore, one = f"{layer}mlp.experts.{number}.", f"{hf}{names.experts}.{number}."
        gate_up = tuple(one + leaf for leaf in leaves)
        table += _swiglu(mcore, gate_up, one + down, experts.size, hidden)
    return table


def _swiglu(mcore: str, gate_up: tuple[str, ...], down: str, size: int, hidden: int) -> list[WeightRow]:
    """Rows of two matrices of `size` rows, gate and up, in one parameter, and of the one back."""
    return [
        matrix_row(f"{mcore}linear_fc1.weight", _parts("", gate_up, [size] * 2, "weight"), hidden),
        matrix_row(f"{mcore}linear_fc2.weight", [Part(f"{down}.weight", hidden)], size),
    ]
