"""Reads the Hugging Face config of a decoder with latent attention: DeepSeek-V3 and what resembles it."""

from collections.abc import Mapping
from dataclasses import replace

from yatt.errors import ConfigError
from yatt.models.config_types import Values, config_size, number_of, positive_of
from yatt.models.dense import ALLOWED, DEFAULT_THETA, read_dense
from yatt.models.shape import LatentAttention, Shape, Yarn

SUPPORTED = {**ALLOWED, "rope_interleave": (None, True)}
ROPE_KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "head_dim")
YARN_KEYS = {
    "rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim",
}  # fmt: skip


def read_latent(values: Values, defaults: Values) -> Shape:
    """Shape of a decoder with latent attention, as if no layer had experts.

    Args:
        values: content of config.json.
        defaults: the family's defaults.

    Raises:
        ConfigError: a key has a value that is not implemented, or is no size.
    """
    theta, yarn = _positions(values)
    plain = {key: value for key, value in values.items() if key not in ROPE_KEYS}
    dense = read_dense({**plain, "rope_theta": theta}, defaults, SUPPORTED)
    filled = {**defaults, **{key: value for key, value in values.items() if value is not None}}
    has_q_rank = values.get("q_lora_rank", defaults["q_lora_rank"]) is not None  # null: without
    attention = LatentAttention(
        num_heads=dense.attention.num_heads, q_rank=config_size(filled, "q_lora_rank") if has_q_rank else 0,
        kv_rank=config_size(filled, "kv_lora_rank"), nope_dim=config_size(filled, "qk_nope_head_dim"),
        rope_dim=config_size(filled, "qk_rope_head_dim"), value_dim=config_size(filled, "v_head_dim"),
    )  # fmt: skip
    if attention.rope_dim % 2:
        raise ConfigError(
            f"model.path: config.json says qk_rope_head_dim={attention.rope_dim}; it needs an even number."
        )
    return replace(
        dense, layers=tuple(replace(layer, attention=attention) for layer in dense.layers), yarn=yarn
    )


def _positions(values: Values) -> tuple[float, Yarn | None]:
    """RoPE base and YaRN, from `rope_scaling` (released models) or `rope_parameters` (transformers 5)."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise _unsupported(rope)
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = positive_of({"rope_theta": values.get("rope_theta", DEFAULT_THETA)} | rope, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn" or rope.keys() - YARN_KEYS:
        raise _unsupported(rope)
    found = {"beta_fast": 32, "beta_slow": 1, **rope}
    wanted = ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
    if any(key not in found for key in wanted) or not (found["mscale"] and found["mscale_all_dim"]):
        raise _unsupported(rope)  # with other rules for what is missing in transformers and megatron-core
    yarn = Yarn(
        factor=positive_of(found, "factor"), original_positions=config_size(found, wanted[1]),
        beta_fast=positive_of(found, "beta_fast"), beta_slow=positive_of(found, "beta_slow"),
        mscale=number_of(found, "mscale"), mscale_all_dim=number_of(found, "mscale_all_dim"),
    )  # fmt: skip
    if yarn.factor < 1 or yarn.beta_slow > yarn.beta_fast:
        raise _unsupported(rope)
    return theta, yarn


def _unsupported(rope: object) -> ConfigError:
    return ConfigError(
        f"model.path: RoPE scaling {rope} is not supported with latent attention; use 'default', or 'yarn' "
        "with factor of 1 or more, original_max_position_embeddings, beta_fast of beta_slow or more, mscale "
        "and mscale_all_dim above 0."
    )
