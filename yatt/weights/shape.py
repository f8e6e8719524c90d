"""Reads and checks a dense decoder's Hugging Face config; no other module reads it.

Supported: Llama, Qwen2 and Qwen3 (dense). Settings that this code does not implement exactly (other
activations, biases, sliding windows, unknown RoPE scalings) are refused by name instead of ignored.

It reads config.json without transformers, so that the launcher refuses a model before anything is started,
with the same rules as the trainer. Missing keys get transformers' defaults.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.errors import ConfigError

SUPPORTED = ("llama", "qwen2", "qwen3")
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Values that megatron-core's rope_scaling hard-codes."""

DEFAULT_THETA = 10000.0
DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Values of keys that are missing in config.json, as in transformers 5.19."""

_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and switches of a dense decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling_factor: float
    """Factor of Llama 3's RoPE scaling; 0: none."""

    is_tied: bool
    """Input and output embeddings are one tensor."""

    has_qkv_bias: bool
    has_qk_norm: bool
    max_positions: int
    init_std: float
    """Standard deviation of random initial weights."""


def read_shape(folder: str) -> ModelShape:
    """Shape of the model in a Hugging Face folder.

    Raises:
        ConfigError: no config.json, or an architecture or feature that is not supported.
    """
    return shape_of(read_config(folder))


def read_config(folder: str) -> dict[str, Any]:
    """Reads a Hugging Face folder's config.json.

    Raises:
        ConfigError: it is missing, or is not one JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path: {folder} has no config.json; name a Hugging Face model folder.")
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {path} cannot be read as JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {path} is not a JSON object; save the model with save_pretrained.")
    return found


def shape_of(config: Any) -> ModelShape:
    """Shape of the model in a config: the content of a config.json, or a `transformers` config object.

    Raises:
        ConfigError: an architecture or feature that is not supported.
    """
    values = dict(config if isinstance(config, Mapping) else config.to_dict())
    kind = values.get("model_type")
    if kind not in SUPPORTED:
        raise ConfigError(
            f"model.path: architecture {kind!r} is not supported; use one of {', '.join(SUPPORTED)}."
        )
    values = DEFAULTS | DEFAULTS_OF[kind] | {key: value for key, value in values.items() if value is not None}
    _refuse_unsupported(values)
    sizes = {key: _size(values, key) for key in SIZES if key in values}
    num_heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    num_kv_heads = sizes.get("num_key_value_heads", num_heads)
    _check_heads(kind, hidden, num_heads, num_kv_heads)
    theta, factor = _rope(values)
    return ModelShape(
        model_type=kind,
        vocab_size=sizes["vocab_size"],
        hidden_size=hidden,
        ffn_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        init_std=_number(values, "initializer_range"),
        head_dim=sizes.get("head_dim", hidden // num_heads),
        norm_eps=_number(values, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling_factor=factor,
        is_tied=bool(values["tie_word_embeddings"]),
        has_qkv_bias=kind == "qwen2",
        has_qk_norm=kind == "qwen3",
        max_positions=sizes["max_position_embeddings"],
    )


def _refuse_unsupported(values: dict[str, Any]) -> None:
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "mlp_bias": (None, False),
        "use_sliding_window": (None, False),
        "attention_dropout": (None, 0, 0.0),
        "partial_rotary_factor": (None, 1.0),
        "quantization_config": (None,),
    }
    if values["model_type"] != "qwen2":
        wanted["attention_bias"] = (None, False)
    for key, allowed in wanted.items():
        if values.get(key) not in allowed:
            raise ConfigError(
                f"model.path: config.json says {key}={values[key]!r}, which the trainer cannot do for "
                f"{values['model_type']}; it needs {allowed[-1]!r}."
            )
    layers = values.get("layer_types") or ()
    if other := [kind for kind in layers if kind != "full_attention"]:
        raise ConfigError(
            f"model.path: config.json says layer_types with {other[0]!r}, which the trainer cannot do; it "
            "needs 'full_attention' in every layer."
        )


def _size(values: dict[str, Any], key: str) -> int:
    value = values[key]
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"model.path: config.json says {key}={value!r}; it needs a whole number of 1 or more."
        )
    return value


def _number(values: dict[str, Any], key: str) -> float:
    value: Any = values.get(key)
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"model.path: config.json says {key}={value!r}; it needs a number of 0 or more.")
    return float(value)


def _check_heads(kind: str, hidden: int, num_heads: int, num_kv_heads: int) -> None:
    if kind == "llama" and hidden % num_heads:
        raise ConfigError(
            f"model.path: config.json says hidden_size={hidden}, which is no multiple of "
            f"num_attention_heads={num_heads}; transformers refuses such a Llama."
        )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"model.path: config.json says num_key_value_heads={num_kv_heads}, which does not divide "
            f"num_attention_heads={num_heads}."
        )


def _rope(values: dict[str, Any]) -> tuple[float, float]:
    """RoPE base, and Llama 3 scaling factor (0: none).

    transformers 5 stores both in `rope_parameters`; older versions use `rope_theta` and `rope_scaling`.
    `rope_scaling` has precedence over `rope_parameters`.
    """
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    unknown = ConfigError(
        f"model.path: RoPE scaling {rope} is not supported; use 'default', or 'llama3' with {LLAMA3_SCALING}."
    )
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise unknown
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = _number({"rope_theta": values.get("rope_theta", DEFAULT_THETA)} | rope, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise unknown
    if kind == "default":
        return theta, 0.0
    longest = values.get("original_max_position_embeddings", values["max_position_embeddings"])
    scaling = {"original_max_position_embeddings": longest} | rope
    if kind != "llama3" or any(scaling.get(key) != value for key, value in LLAMA3_SCALING.items()):
        raise unknown
    return theta, _number(scaling, "factor")
