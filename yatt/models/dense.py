"""Reads the Hugging Face config of a decoder: dense ones (Llama, Qwen2, Qwen3 and what resembles them), and
those with latent attention (DeepSeek-V3 and what resembles it), as if no layer had experts.

Settings that this code does not implement exactly (other activations, biases, unknown RoPE scalings) are
refused by name instead of ignored. Missing keys get transformers' defaults.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from yatt.errors import ConfigError
from yatt.models.config_types import (
    Values,
    config_size,
    flag_of,
    number_of,
    positive_of,
    refused_config,
    refused_model,
)
from yatt.models.quantized import is_quantised
from yatt.models.shape import DenseFeedForward, GroupedAttention, LatentAttention, Layer, Shape, Yarn
from yatt.models.windows import WindowRule, no_windows

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

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (None, False),
    "attention_dropout": (None, 0, 0.0),
    "partial_rotary_factor": (None, 1.0),
    "attention_bias": (None, False),
}
"""Values with which a dense decoder is what the trainer builds."""


def read_dense(
    values: Values, defaults: Values, allowed: Values = ALLOWED, *,
    has_qkv_bias: bool = False, has_qk_norm: bool = False, windows: WindowRule = no_windows,
) -> Shape:  # fmt: skip
    """Shape of a dense decoder whose layers differ in nothing but their windows.

    Args:
        values: content of config.json.
        defaults: the family's defaults, beside `DEFAULTS`.
        allowed: values that other keys may have.
        windows: the family's rule for them.

    Raises:
        ConfigError: a key has a value that is not implemented, or is no size.
    """
    filled = {**DEFAULTS, **defaults, **{key: value for key, value in values.items() if value is not None}}
    _refuse_unsupported(filled, allowed)
    sizes = {key: config_size(filled, key) for key in SIZES if key in filled}
    num_heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    num_kv_heads = sizes.get("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise refused_config(
            f"says num_key_value_heads={num_kv_heads}, which does not divide num_attention_heads={num_heads}."
        )
    theta, factor = _rope(filled)
    attention = GroupedAttention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=sizes.get("head_dim", hidden // num_heads),
        has_qkv_bias=has_qkv_bias, has_qk_norm=has_qk_norm,
    )  # fmt: skip
    layer = Layer(attention=attention, feed_forward=DenseFeedForward(size=sizes["intermediate_size"]))
    found = windows({**defaults, **values}, sizes["num_hidden_layers"])
    return Shape(
        vocab_size=sizes["vocab_size"],
        hidden_size=hidden,
        layers=tuple(replace(layer, attention=replace(attention, window=window)) for window in found),
        norm_eps=number_of(filled, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling_factor=factor,
        is_tied=flag_of(filled, "tie_word_embeddings"),
        max_positions=sizes["max_position_embeddings"],
        init_std=number_of(filled, "initializer_range"),
    )


def _refuse_unsupported(values: Values, allowed: Values) -> None:
    is_quantised(values)
    for key, wanted in allowed.items():
        if values.get(key) not in wanted:
            raise refused_config(
                f"says {key}={values.get(key)!r}, which the trainer cannot do for "
                f"{values['model_type']}; it needs {wanted[-1]!r}."
            )


def without_rotary_share(values: Values, default: float) -> tuple[dict[str, Any], float]:
    """The content of config.json without the share of a head's elements that depend on the position; and it.

    Raises:
        ConfigError: it is not above 0 and at most 1.
    """
    key, found = "partial_rotary_factor", {"partial_rotary_factor": default}
    plain = {name: value for name, value in values.items() if name != key}
    found |= {key: values[key]} if values.get(key) is not None else {}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := values.get(name), Mapping):
            found |= {key: rope[key]} if rope.get(key) is not None else {}
            plain[name] = {inner: value for inner, value in rope.items() if inner != key}
    share = number_of(found, key)
    if not 0 < share <= 1:
        raise refused_config(f"says {key}={share!r}; it needs a number in (0, 1].")
    return plain, share


def without_rotary_dim(filled: Values) -> tuple[dict[str, Any], float]:
    """The content of MiniMax-M2's config.json without the share of a head's elements that depend on the
    position; and it. vLLM needs `rotary_dim`; with a share beside it, both read the share.

    Args:
        filled: has `head_dim`.

    Raises:
        ConfigError: there is none, or the share is another.
    """
    if "rotary_dim" not in filled:
        raise refused_config(
            "says no rotary_dim; write the number of a head's elements that depend on the "
            "position, which released models have (64)."
        )
    rotated, head_dim = config_size(filled, "rotary_dim"), config_size(filled, "head_dim")
    plain, share = without_rotary_share(filled, min(rotated / head_dim, 1))
    if share * head_dim != rotated or rotated % 2:
        raise refused_config(
            f"says rotary_dim={rotated} of the {head_dim} elements of a head, and "
            f"partial_rotary_factor={share:g}; they need to say the same, an even number."
        )
    return plain, share


def _rope(values: Values) -> tuple[float, float]:
    """RoPE base, and Llama 3 scaling factor (0: none).

    transformers 5 stores both in `rope_parameters`; older versions use `rope_theta` and `rope_scaling`.
    `rope_scaling` has precedence over `rope_parameters`.
    """
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    unknown = refused_model(
        f"RoPE scaling {rope} is not supported; use 'default', or 'llama3' with {LLAMA3_SCALING}."
    )
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise unknown
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = positive_of({"rope_theta": values.get("rope_theta", DEFAULT_THETA)} | rope, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise unknown
    if kind == "default":
        return theta, 0.0
    longest = values.get("original_max_position_embeddings", values["max_position_embeddings"])
    scaling = {"original_max_position_embeddings": longest} | rope
    if kind != "llama3" or any(scaling.get(key) != value for key, value in LLAMA3_SCALING.items()):
        raise unknown
    return theta, number_of(scaling, "factor")


LATENT_ALLOWED = {**ALLOWED, "rope_interleave": (None, True)}
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
    theta, yarn = _latent_positions(values)
    plain = {key: value for key, value in values.items() if key not in ROPE_KEYS}
    dense = read_dense({**plain, "rope_theta": theta}, defaults, LATENT_ALLOWED)
    filled = {**defaults, **{key: value for key, value in values.items() if value is not None}}
    has_q_rank = values.get("q_lora_rank", defaults["q_lora_rank"]) is not None  # null: without
    attention = LatentAttention(
        num_heads=dense.attention.num_heads, q_rank=config_size(filled, "q_lora_rank") if has_q_rank else 0,
        kv_rank=config_size(filled, "kv_lora_rank"), nope_dim=config_size(filled, "qk_nope_head_dim"),
        rope_dim=config_size(filled, "qk_rope_head_dim"), value_dim=config_size(filled, "v_head_dim"),
    )  # fmt: skip
    if attention.rope_dim % 2:
        raise refused_config(f"says qk_rope_head_dim={attention.rope_dim}; it needs an even number.")
    return replace(
        dense, layers=tuple(replace(layer, attention=attention) for layer in dense.layers), yarn=yarn
    )


def _latent_positions(values: Values) -> tuple[float, Yarn | None]:
    """RoPE base and YaRN, from `rope_scaling` (released models) or `rope_parameters` (transformers 5)."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise _unsupported_yarn(rope)
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = positive_of({"rope_theta": values.get("rope_theta", DEFAULT_THETA)} | rope, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn" or rope.keys() - YARN_KEYS:
        raise _unsupported_yarn(rope)
    found = {"beta_fast": 32, "beta_slow": 1, **rope}
    wanted = ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
    if any(key not in found for key in wanted) or not (found["mscale"] and found["mscale_all_dim"]):
        raise _unsupported_yarn(
            rope
        )  # with other rules for what is missing in transformers and megatron-core
    yarn = Yarn(
        factor=positive_of(found, "factor"), original_positions=config_size(found, wanted[1]),
        beta_fast=positive_of(found, "beta_fast"), beta_slow=positive_of(found, "beta_slow"),
        mscale=number_of(found, "mscale"), mscale_all_dim=number_of(found, "mscale_all_dim"),
    )  # fmt: skip
    if yarn.factor < 1 or yarn.beta_slow > yarn.beta_fast:
        raise _unsupported_yarn(rope)
    return theta, yarn


def _unsupported_yarn(rope: object) -> ConfigError:
    return refused_model(
        f"RoPE scaling {rope} is not supported with latent attention; use 'default', or 'yarn' with factor "
        "of 1 or more, original_max_position_embeddings, beta_fast of beta_slow or more, mscale and "
        "mscale_all_dim above 0."
    )


WINDOW_THETA = 500000.0
"""Base that transformers takes for OLMo-3's layers with a window where config.json has none of their own."""

LAYER_KINDS = ("full_attention", "sliding_attention")
LAYER_YARN_KEYS = {
    "rope_theta", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "attention_factor",
}  # fmt: skip


def without_layer_rope(values: Values) -> tuple[dict[str, Any], Yarn | None]:
    """The content of OLMo-3's config.json with one plain RoPE; and the YaRN of its layers without a window.

    transformers 5 saves `rope_parameters` for both kinds of layers. Released models have `rope_theta`, and a
    `rope_scaling` that is of layers without a window only.

    Raises:
        ConfigError: the kinds differ in more than YaRN, or it has a setting that is not implemented.
    """
    kinds, scaling = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    parts = [scaling, kinds, *(kinds.values() if isinstance(kinds, Mapping) else ())]
    if not all(isinstance(each, Mapping) for each in parts if each is not None) or {*kinds} - {*LAYER_KINDS}:
        raise _unsupported_layers(kinds, scaling)
    whole, narrow = ({"rope_type": "default", **(kinds.get(kind) or {})} for kind in LAYER_KINDS)
    whole = {"rope_theta": values.get("rope_theta", WINDOW_THETA), **whole, **scaling}
    whole, narrow = ({key: v for key, v in each.items() if v is not None} for each in (whole, narrow))
    bases = [positive_of({"rope_theta": WINDOW_THETA, **each}, "rope_theta") for each in (whole, narrow)]
    if bases[0] != bases[1]:
        raise refused_config(
            f"says rope_theta={bases[0]:g} for layers without a window and {bases[1]:g} for "
            f"those with one, which transformers takes where rope_parameters has none for {LAYER_KINDS[1]}; "
            "the trainer needs the same for both."
        )
    if narrow["rope_type"] != "default" or narrow.keys() - {"rope_type", "rope_theta"}:
        raise _unsupported_layers(kinds, scaling)
    plain = {key: value for key, value in values.items() if key not in ("rope_parameters", "rope_scaling")}
    return {**plain, "rope_theta": bases[0]}, _layer_yarn(whole, _unsupported_layers(kinds, scaling))


def _layer_yarn(rope: Values, unsupported: ConfigError) -> Yarn | None:
    """YaRN whose temperature is the length of turned queries and keys; transformers' default if none is
    said."""
    if rope["rope_type"] == "default" and not rope.keys() - {"rope_type", "rope_theta"}:
        return None
    found = {"beta_fast": 32, "beta_slow": 1, **rope}
    wanted = ("factor", "original_max_position_embeddings")
    if rope["rope_type"] != "yarn" or rope.keys() - LAYER_YARN_KEYS or any(key not in rope for key in wanted):
        raise unsupported
    factor, fast, slow = (positive_of(found, key) for key in ("factor", "beta_fast", "beta_slow"))
    if factor <= 1 or slow > fast:
        raise unsupported
    grown = 0.1 * math.log(factor)
    scale = positive_of({"attention_factor": grown + 1, **rope}, "attention_factor")
    return Yarn(
        factor=factor, original_positions=config_size(found, wanted[1]), beta_fast=fast, beta_slow=slow,
        mscale=(scale - 1) / grown, mscale_all_dim=0.0,
    )  # fmt: skip


def _unsupported_layers(kinds: object, scaling: object) -> ConfigError:
    return refused_model(
        f"RoPE with rope_parameters={kinds} and rope_scaling={scaling} is not supported; layers with a "
        f"window ({LAYER_KINDS[1]}) need rope_type 'default', those without ({LAYER_KINDS[0]}, and "
        "rope_scaling) 'default', or 'yarn' with factor above 1, original_max_position_embeddings, "
        "beta_fast of beta_slow or more and attention_factor."
    )
