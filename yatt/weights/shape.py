"""What a Hugging Face config says about a dense decoder, checked once; nothing else reads the config.

Supported: Llama, Qwen2 and Qwen3 (dense). Everything this code could not honour exactly (other
activations, biases, sliding windows, unknown RoPE scalings) is refused by name instead of ignored.
"""

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
"""What megatron-core's rope_scaling hard-codes."""


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
    """Of Llama 3's RoPE scaling; 0: none."""

    is_tied: bool
    """Input and output embeddings are one tensor."""

    has_qkv_bias: bool
    has_qk_norm: bool
    max_positions: int
    init_std: float
    """Standard deviation of weights that are drawn."""


def read_shape(folder: str) -> ModelShape:
    """Shape of the model in a Hugging Face folder.

    Raises:
        ConfigError: no config.json, or an architecture or feature that is not supported.
    """
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"model.path: {folder} has no config.json; name a Hugging Face model folder.")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except ValueError as error:
        raise ConfigError(f"model.path: {folder}: transformers does not know this model: {error}") from error
    return shape_of(config)


def shape_of(config: Any) -> ModelShape:
    """Shape a `transformers` config object describes.

    Raises:
        ConfigError: an architecture or feature that is not supported.
    """
    _refuse_unsupported(config)
    theta, factor = _rope(config)
    return ModelShape(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        init_std=config.initializer_range,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        rope_theta=theta,
        rope_scaling_factor=factor,
        is_tied=bool(config.tie_word_embeddings),
        has_qkv_bias=config.model_type == "qwen2",
        has_qk_norm=config.model_type == "qwen3",
        max_positions=config.max_position_embeddings,
    )


def _refuse_unsupported(config: Any) -> None:
    if config.model_type not in SUPPORTED:
        raise ConfigError(
            f"model.path: architecture {config.model_type!r} is not supported; "
            f"use one of {', '.join(SUPPORTED)}."
        )
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "mlp_bias": (None, False),
        "use_sliding_window": (None, False),
        "attention_dropout": (None, 0, 0.0),
    }
    if config.model_type != "qwen2":
        wanted["attention_bias"] = (None, False)
    for key, allowed in wanted.items():
        value = getattr(config, key, None)
        if value not in allowed:
            raise ConfigError(
                f"model.path: config.json says {key}={value!r}, which the trainer cannot do for "
                f"{config.model_type}; it needs {allowed[-1]!r}."
            )


def _rope(config: Any) -> tuple[float, float]:
    """Base and Llama 3 scaling factor; transformers 5 keeps both in `rope_parameters`."""
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    theta = float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return theta, 0.0
    if kind != "llama3" or any(rope.get(key) != value for key, value in LLAMA3_SCALING.items()):
        raise ConfigError(
            f"model.path: RoPE scaling {rope} is not supported; use 'default', or 'llama3' with "
            f"{LLAMA3_SCALING}."
        )
    return theta, float(rope["factor"])
