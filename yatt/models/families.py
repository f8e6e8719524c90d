"""The model families that yatt knows; no other module asks for a model type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from yatt.models.config_types import config_count, config_size, flag_of, refused_config
from yatt.models.dense import (
    ALLOWED,
    read_dense,
    read_latent,
    without_layer_rope,
    without_rotary_dim,
    without_rotary_share,
)
from yatt.models.experts import with_experts, with_sigmoid_experts, with_stacked_experts
from yatt.models.rows import LayerNames, WeightRow, decoder_table, layer_rows
from yatt.models.shape import GroupedAttention, Shape
from yatt.models.towers.tiled import INTERN, read_tiled
from yatt.models.towers.tower import GLM4V, QWEN2_5, QWEN3, TowerKind, read_seeing, seeing_rows
from yatt.models.windows import (
    DEFAULT_WINDOW,
    WindowRule,
    alternate_windows,
    flagged_windows,
    late_windows,
    listed_windows,
    most_windows,
    no_windows,
    same_windows,
)


def dense_rows(shape: Shape) -> list[WeightRow]:
    """The weight table with Llama's names."""
    return decoder_table(shape, layer_rows(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    Args:
        model_type: its name in config.json.
        architecture: the class in transformers and vLLM, as in config.json.
        read: from the content of config.json to the shape; raises ConfigError with the key that it refuses.
        rows: the weight table of a shape.
        tower: the kind of its tower for pictures before the decoder; None: it takes text only.
        transformers_type: the model type whose classes it has in transformers; empty: its own.
        file_names: parts of names of transformers' modules, and what the files have in place of each.
        has_layer_windows: vLLM's class can have a window in some layers only; else in all layers or none.
        lacks_cpu_engine: vLLM's CPU build cannot run it.
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any]], Shape]
    rows: Callable[[Shape], list[WeightRow]] = dense_rows
    tower: TowerKind | None = None
    transformers_type: str = ""
    file_names: tuple[tuple[str, str], ...] = ()
    has_layer_windows: bool = False
    lacks_cpu_engine: bool = False


_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_MISTRAL = {
    "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}  # fmt: skip
_QWEN2_ALLOWED = {key: value for key, value in ALLOWED.items() if key != "attention_bias"}


def _llama(values: Mapping[str, Any]) -> Shape:
    shape = read_dense(
        values, {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}
    )
    if shape.hidden_size % shape.attention.num_heads:
        raise refused_config(
            f"says hidden_size={shape.hidden_size}, which is no multiple of "
            f"num_attention_heads={shape.attention.num_heads}; transformers refuses such a Llama."
        )
    return shape


def _mistral(values: Mapping[str, Any]) -> Shape:
    return read_dense(values, _MISTRAL | {"sliding_window": DEFAULT_WINDOW}, windows=listed_windows)


_MIXTRAL = {
    **_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
_MIXTRAL_FILES = (
    (".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"),
)  # fmt: skip


def _mixtral(values: Mapping[str, Any]) -> Shape:
    allowed = {**ALLOWED, "router_jitter_noise": (None, 0, 0.0)}
    dense = read_dense(values, _MIXTRAL, allowed, windows=same_windows)
    assert dense.dense is not None, "every layer, before it has experts"
    return with_experts({**values, "moe_intermediate_size": dense.dense.size}, dense, _MIXTRAL)


def _mixtral_rows(shape: Shape) -> list[WeightRow]:
    moe = "block_sparse_moe"
    names = LayerNames(
        router=f"{moe}.gate", experts=f"{moe}.experts", gate_up=("mlp.w1", "mlp.w3"), down="mlp.w2",
        router_bias=f"{moe}.e_score_correction_bias",
    )  # fmt: skip
    return decoder_table(shape, layer_rows(shape, names))


_OLMO = {
    "vocab_size": 50304, "intermediate_size": 11008, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip


def _olmo2(values: Mapping[str, Any]) -> Shape:
    return _over_all_heads(read_dense(values, _OLMO), norms_after=True)


def _olmo3(values: Mapping[str, Any]) -> Shape:
    plain, yarn = without_layer_rope(values)
    defaults = {**_OLMO, "sliding_window": DEFAULT_WINDOW}
    dense = read_dense(plain, defaults, windows=most_windows)
    return replace(_over_all_heads(dense, norms_after=True), yarn=yarn)


def _over_all_heads(shape: Shape, *, norms_after: bool) -> Shape:
    layers = []
    for layer in shape.layers:
        assert isinstance(layer.attention, GroupedAttention), "as `read_dense` gives it"
        attention = replace(layer.attention, has_qk_norm=True, norms_all_heads=True)
        layers.append(replace(layer, attention=attention, norms_after=norms_after))
    return replace(shape, layers=tuple(layers))


def _olmo_rows(shape: Shape) -> list[WeightRow]:
    names = LayerNames(input_norm="post_attention_layernorm", ffn_norm="post_feedforward_layernorm")
    return decoder_table(shape, layer_rows(shape, names))


_MINIMAX = {
    "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
    "rope_theta": 5000000.0, "num_local_experts": 256, "num_experts_per_tok": 8, "num_mtp_modules": 0,
}  # fmt: skip
_MINIMAX_ALLOWED = {
    **ALLOWED, "scoring_func": ("sigmoid",), "use_routing_bias": (True,), "use_qk_norm": (None, True),
    "qk_norm_type": (None, "per_layer"), "shared_intermediate_size": (None, 0), "postnorm": (None, False),
    "router_jitter_noise": (None, 0, 0.0), "attention_output_gate": (None, False),
    **dict.fromkeys(
        ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
        (None, 1, 1.0),
    ),
}  # fmt: skip
"""vLLM needs the first two keys; transformers reads none of those that are about experts and norms."""


def _minimax_m2(values: Mapping[str, Any]) -> Shape:
    filled = {**_MINIMAX, **{key: value for key, value in values.items() if value is not None}}
    kinds = filled.get("attn_type_list", [1])
    if not isinstance(kinds, list | tuple) or any(kind != 1 for kind in kinds):
        raise refused_config(
            f"says attn_type_list={kinds!r}, which the trainer cannot do; it needs 1, attention "
            "to all tokens before, in every layer."
        )
    plain, share = without_rotary_dim(filled)
    dense = _over_all_heads(read_dense(plain, _MINIMAX, _MINIMAX_ALLOWED), norms_after=False)
    experts = {
        **dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor"), 1),
        **dict.fromkeys(("first_k_dense_replace", "n_shared_experts"), 0),
        "n_routed_experts": config_size(filled, "num_local_experts"),
        "moe_intermediate_size": filled["intermediate_size"], "norm_topk_prob": True,
        "num_nextn_predict_layers": config_count(filled, "num_mtp_modules"),
    }  # fmt: skip
    return with_sigmoid_experts({**filled, **experts}, replace(dense, rotary_share=share), _MINIMAX)


def _qwen2(values: Mapping[str, Any], windows: WindowRule = no_windows) -> Shape:
    return read_dense(values, _QWEN, _QWEN2_ALLOWED, has_qkv_bias=True, windows=windows)


def _qwen3(values: Mapping[str, Any], windows: WindowRule = no_windows) -> Shape:
    return read_dense(values, _QWEN | {"head_dim": 128}, has_qk_norm=True, windows=windows)


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
    return _qwen3_experts(values, flagged_windows)


def _qwen3_experts(values: Mapping[str, Any], windows: WindowRule = no_windows) -> Shape:
    dense = read_dense(values, _QWEN3_MOE, has_qk_norm=True, windows=windows)
    return with_experts(values, dense, _QWEN3_MOE)


def _qwen2_moe(values: Mapping[str, Any]) -> Shape:
    if values.get("qkv_bias", True) is not True:
        raise refused_config("says qkv_bias=False, which the trainer cannot do.")
    dense = read_dense(values, _QWEN2_MOE, _QWEN2_ALLOWED, has_qkv_bias=True, windows=alternate_windows)
    return with_experts(values, dense, _QWEN2_MOE, is_shared=True)


_SIGMOID_MOE = {
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_SIGMOID_MOE, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_GLM4_MOE = {
    **_SIGMOID_MOE, "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408, "n_routed_experts": 128,
}  # fmt: skip
GLM_ROTARY_SHARE = 0.5


def _deepseek_v3(values: Mapping[str, Any]) -> Shape:
    return with_sigmoid_experts(values, read_latent(values, _DEEPSEEK_V3), _DEEPSEEK_V3)


def _glm4_moe(values: Mapping[str, Any]) -> Shape:
    plain, share = without_rotary_share(values, GLM_ROTARY_SHARE)
    flags = {"attention_bias": False, "use_qk_norm": False}
    flags |= {key: values[key] for key in flags if values.get(key) is not None}
    dense = read_dense(
        plain, _GLM4_MOE, _QWEN2_ALLOWED, has_qkv_bias=flag_of(flags, "attention_bias"),
        has_qk_norm=flag_of(flags, "use_qk_norm"),
    )  # fmt: skip
    if (rotated := share * dense.attention.head_dim) < 2 or rotated % 2:
        raise refused_config(
            f"says partial_rotary_factor={share}, {rotated:g} of the {dense.attention.head_dim} "
            "elements of a head; they need to be an even number, 2 or more."
        )
    return with_sigmoid_experts(values, replace(dense, rotary_share=share), _GLM4_MOE)


def _deepseek_rows(shape: Shape) -> list[WeightRow]:
    """Llama's names, and DeepSeek's of shared experts."""
    return decoder_table(shape, layer_rows(shape, LayerNames(shared="mlp.shared_experts")))


_QWEN3_VL_MOE = {
    **_QWEN3_MOE, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 128000, "moe_intermediate_size": 1408, "num_experts_per_tok": 4,
    "num_experts": 60, "norm_topk_prob": True,
}  # fmt: skip


def _need_flag(values: Mapping[str, Any], key: str, *, wanted: bool) -> None:
    """Refuses a config without a flag that vLLM reads and transformers does not: they would differ."""
    if (found := values.get(key)) is not wanted:
        raise refused_config(
            f"says {key}={found!r}; text_config needs {key}={str(wanted).lower()}, which "
            "released models have."
        )


def _qwen3_vl_moe(values: Mapping[str, Any]) -> Shape:
    _need_flag(values, "norm_topk_prob", wanted=True)
    shape = with_experts(values, read_dense(values, _QWEN3_VL_MOE, has_qk_norm=True), _QWEN3_VL_MOE)
    if shape.experts and shape.hidden_size in (shape.experts.size, 2 * shape.experts.size):
        raise refused_config(
            f"says hidden_size={shape.hidden_size} and "
            f"moe_intermediate_size={shape.experts.size}; it cannot be told whether such experts are "
            "transposed in the files."
        )
    return shape


def _glm4v_moe(values: Mapping[str, Any]) -> Shape:
    _need_flag(values, "use_qk_norm", wanted=False)
    return _glm4_moe({"attention_bias": True, "num_nextn_predict_layers": 0, **values})


def _stacked_rows(shape: Shape) -> list[WeightRow]:
    table = dense_rows(shape)
    return with_stacked_experts(table, shape.experts.num_experts) if shape.experts else table


def _seeing(
    model_type: str, architecture: str, kind: TowerKind, read: Callable[[Mapping[str, Any]], Shape],
    rows: Callable[[Shape], list[WeightRow]] = dense_rows,
) -> Family:  # fmt: skip
    """A family whose decoder is another's."""
    return Family(
        model_type=model_type, architecture=architecture,
        read=lambda values: read_seeing(values, kind, read),
        rows=lambda shape: seeing_rows(shape, kind, rows(shape)), tower=kind,
    )  # fmt: skip


_TILED_TEXT = {"qwen2": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3_experts}

FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="llama", architecture="LlamaForCausalLM", read=_llama),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            read=_mistral,
            has_layer_windows=True,
        ),
        Family(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            read=_mixtral,
            rows=_mixtral_rows,
            file_names=_MIXTRAL_FILES,
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            read=lambda values: _qwen2(values, late_windows),
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            read=lambda values: _qwen3(values, late_windows),
        ),
        Family(model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", read=_qwen2_moe),
        Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=_qwen3_moe),
        Family(model_type="olmo2", architecture="Olmo2ForCausalLM", read=_olmo2, rows=_olmo_rows),
        Family(
            model_type="olmo3",
            architecture="Olmo3ForCausalLM",
            read=_olmo3,
            rows=_olmo_rows,
            has_layer_windows=True,
        ),
        Family(
            model_type="minimax_m2",
            architecture="MiniMaxM2ForCausalLM",
            read=_minimax_m2,
            rows=_mixtral_rows,
            file_names=_MIXTRAL_FILES,
            lacks_cpu_engine=True,
        ),
        Family(model_type="glm4_moe", architecture="Glm4MoeForCausalLM", read=_glm4_moe, rows=_deepseek_rows),
        Family(
            model_type="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            read=_deepseek_v3,
            rows=_deepseek_rows,
        ),
        Family(
            model_type="kimi_k2",
            architecture="DeepseekV3ForCausalLM",
            read=_deepseek_v3,
            rows=_deepseek_rows,
            transformers_type="deepseek_v3",
        ),
        _seeing("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", QWEN2_5, _qwen2),
        _seeing("qwen3_vl", "Qwen3VLForConditionalGeneration", QWEN3, _qwen3),
        _seeing("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", QWEN3, _qwen3_vl_moe, _stacked_rows),
        _seeing("glm4v_moe", "Glm4vMoeForConditionalGeneration", GLM4V, _glm4v_moe, _deepseek_rows),
        Family(
            model_type="internvl",
            architecture="InternVLForConditionalGeneration",
            tower=INTERN,
            read=lambda values: read_tiled(values, _TILED_TEXT),
            rows=lambda shape: seeing_rows(shape, INTERN, dense_rows(shape)),
        ),
    )
}
