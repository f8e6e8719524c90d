"""The model families that yatt knows; no other module asks for a model type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from yatt.errors import ConfigError
from yatt.models.dense import ALLOWED, read_dense
from yatt.models.experts import with_experts
from yatt.models.rows import WeightRow, decoder, layer_rows
from yatt.models.shape import Shape


def dense_rows(shape: Shape) -> list[WeightRow]:
    """The weight table with Llama's names."""
    return decoder(shape, layer_rows(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    Args:
        model_type: its name in config.json.
        architecture: the class in transformers and vLLM, as in config.json.
        read: from the content of config.json to the shape; raises ConfigError with the key that it refuses.
        rows: the weight table of a shape.
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any]], Shape]
    rows: Callable[[Shape], list[WeightRow]] = dense_rows


_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_QWEN2_ALLOWED = {key: value for key, value in ALLOWED.items() if key != "attention_bias"}


def _llama(values: Mapping[str, Any]) -> Shape:
    shape = read_dense(
        values, {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}
    )
    if shape.hidden_size % shape.attention.num_heads:
        raise ConfigError(
            f"model.path: config.json says hidden_size={shape.hidden_size}, which is no multiple of "
            f"num_attention_heads={shape.attention.num_heads}; transformers refuses such a Llama."
        )
    return shape


def _qwen2(values: Mapping[str, Any]) -> Shape:
    return read_dense(values, _QWEN, _QWEN2_ALLOWED, has_qkv_bias=True)


def _qwen3(values: Mapping[str, Any]) -> Shape:
    return read_dense(values, _QWEN | {"head_dim": 128}, has_qk_norm=True)


_QWEN3_MOE = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False, "decoder_sparse_step": 1,
}  # fmt: skip
_QWEN2_MOE = {
    **_QWEN3_MOE, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
    "num_experts": 60,
}  # fmt: skip


def _qwen3_moe(values: Mapping[str, Any]) -> Shape:
    return with_experts(values, read_dense(values, _QWEN3_MOE, has_qk_norm=True), _QWEN3_MOE)


def _qwen2_moe(values: Mapping[str, Any]) -> Shape:
    if values.get("qkv_bias", True) is not True:
        raise ConfigError("model.path: config.json says qkv_bias=False, which the trainer cannot do.")
    dense = read_dense(values, _QWEN2_MOE, _QWEN2_ALLOWED, has_qkv_bias=True)
    return with_experts(values, dense, _QWEN2_MOE, is_shared=True)


FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="llama", architecture="LlamaForCausalLM", read=_llama),
        Family(model_type="qwen2", architecture="Qwen2ForCausalLM", read=_qwen2),
        Family(model_type="qwen3", architecture="Qwen3ForCausalLM", read=_qwen3),
        Family(model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", read=_qwen2_moe),
        Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=_qwen3_moe),
    )
}
