"""Table of weight names in Hugging Face and in megatron-core (Transformer Engine's names).

An entry defines how Hugging Face tensors form a megatron-core parameter, and how tensor parallelism splits
it. A mixture of experts would only need more entries, with a second index.
"""

from dataclasses import dataclass
from typing import Literal

from yatt.weights.shape import ModelShape

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
Cut = Literal["whole", "vocabulary", "columns", "qkv", "gate_up"]
"""Split of a parameter by tensor parallelism: none; padded rows; columns; by query groups, each
[queries, key, value]; gate and up each by rows."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter; layers are numbered globally from 0."""

    name: str
    hf_names: tuple[str, ...]
    cut: Cut = "whole"


def entries(shape: ModelShape) -> list[Entry]:
    """All parameters of the model, in the order in which weights are exported.

    With tied embeddings the table has no output layer, because it is the embedding.
    """
    table = [Entry(EMBEDDING, ("model.embed_tokens.weight",), "vocabulary")]
    for layer in range(shape.num_layers):
        table += _layer_entries(shape, layer)
    table.append(Entry("decoder.final_layernorm.weight", ("model.norm.weight",)))
    if not shape.is_tied:
        table.append(Entry(OUTPUT, ("lm_head.weight",), "vocabulary"))
    return table


def _layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    mcore, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention, mlp = mcore + "self_attention.", mcore + "mlp."

    def projections(*leaves: str, kind: str = "weight") -> tuple[str, ...]:
        return tuple(f"{hf}{leaf}_proj.{kind}" for leaf in leaves)

    qkv = ("self_attn.q", "self_attn.k", "self_attn.v")
    table = [
        Entry(attention + "linear_qkv.layer_norm_weight", (hf + "input_layernorm.weight",)),
        Entry(attention + "linear_qkv.weight", projections(*qkv), "qkv"),
    ]
    if shape.has_qkv_bias:
        table.append(Entry(attention + "linear_qkv.bias", projections(*qkv, kind="bias"), "qkv"))
    if shape.has_qk_norm:
        table += [
            Entry(attention + f"{which}_layernorm.weight", (f"{hf}self_attn.{which}_norm.weight",))
            for which in "qk"
        ]
    return [
        *table,
        Entry(attention + "linear_proj.weight", projections("self_attn.o"), "columns"),
        Entry(mlp + "linear_fc1.layer_norm_weight", (hf + "post_attention_layernorm.weight",)),
        Entry(mlp + "linear_fc1.weight", projections("mlp.gate", "mlp.up"), "gate_up"),
        Entry(mlp + "linear_fc2.weight", projections("mlp.down"), "columns"),
    ]
