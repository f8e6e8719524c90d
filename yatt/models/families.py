"""The model families that yatt knows; no other module asks for a model type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from yatt.errors import ConfigError
from yatt.models.dense import ALLOWED, read_dense
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


FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="llama", architecture="LlamaForCausalLM", read=_llama),
        Family(model_type="qwen2", architecture="Qwen2ForCausalLM", read=_qwen2),
        Family(model_type="qwen3", architecture="Qwen3ForCausalLM", read=_qwen3),
    )
}
