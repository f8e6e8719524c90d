"""DeepSeek-V3, Kimi-K2, GLM-4.5: config.json is read as by transformers, the table has all that is saved."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.tiny_models import saved_shapes
from yatt.engine.transformers import config_of_classes
from yatt.errors import ConfigError
from yatt.models.model import model_of, read_model
from yatt.models.shape import DenseFeedForward, Experts, LatentAttention
from yatt.models.tensors import tensor_faults

COMMON = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 96,
          "vocab_size": 99, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
          "first_k_dense_replace": 1}  # fmt: skip
DEEPSEEK = {**COMMON, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 24,
            "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}  # fmt: skip
GLM = {**COMMON, "num_key_value_heads": 2, "head_dim": 16}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
RELEASED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1}
"""Keys of released DeepSeek-V3 that transformers does not have."""


def written(folder: Path, **values: Any) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", DEEPSEEK),
        ("deepseek_v3", {**DEEPSEEK, **RELEASED, "rope_scaling": YARN, "rope_theta": 10000}),
        ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_theta": 5e4}),
        ("glm4_moe", {"head_dim": 128}),
        ("glm4_moe", {**GLM, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.25}),
    ],
)
def test_a_config_means_what_transformers_means(tmp_path: Path, kind: str, values: dict) -> None:
    folder = written(tmp_path, model_type=kind, **values)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    read = read_model(folder)
    assert read == model_of(theirs)
    experts, attention = read.shape.experts, read.shape.attention
    assert read.shape.is_regular and experts is not None and experts.sigmoid is not None
    assert (experts.num_experts, experts.top_k, experts.size) == (
        theirs.n_routed_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size,
    )  # fmt: skip
    assert experts.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    router = experts.sigmoid
    assert (router.scale, router.num_groups, router.top_groups) == (
        theirs.routed_scaling_factor, theirs.n_group, theirs.topk_group,
    )  # fmt: skip
    assert read.shape.rope_theta == theirs.rope_parameters["rope_theta"]
    assert read.shape.rotary_share == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert read.shape.num_extra_layers == 1
    if isinstance(attention, LatentAttention):
        assert attention.q_rank == (theirs.q_lora_rank or 0)
        assert (attention.kv_rank, attention.nope_dim, attention.rope_dim, attention.value_dim) == (
            theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim,
        )  # fmt: skip
        assert (read.shape.yarn is not None) == (theirs.rope_parameters["rope_type"] == "yarn")


@pytest.mark.parametrize(("kind", "values"), [("deepseek_v3", DEEPSEEK), ("glm4_moe", GLM)])
def test_the_table_has_every_tensor_that_is_saved(tmp_path: Path, kind: str, values: dict) -> None:
    config = transformers.AutoConfig.for_model(kind, **values)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = read_model(str(tmp_path))
    shapes = saved_shapes(tmp_path)
    assert list(tensor_faults(model, shapes)) == []
    kinds = [type(layer.feed_forward) for layer in model.shape.layers]
    assert kinds == [DenseFeedForward, Experts, Experts]
    extra = shapes | {"model.layers.3.eh_proj.weight": (64, 128)}
    assert list(tensor_faults(model, extra)) == [], "a layer that predicts further tokens is left out"
    (said,) = tensor_faults(model, shapes | {"model.layers.4.eh_proj.weight": (64, 128)})
    assert "not use: model.layers.4.eh_proj.weight" in said


@pytest.mark.parametrize("dropped", ["expert_bias", "shared_experts"])
def test_a_table_without_the_routers_bias_or_shared_experts_is_refused(tmp_path: Path, dropped: str) -> None:
    config = transformers.AutoConfig.for_model("deepseek_v3", **DEEPSEEK)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = read_model(str(tmp_path))
    rows = tuple(row for row in model.rows if dropped not in row.name)
    shapes = saved_shapes(tmp_path)
    (said,) = tensor_faults(type(model)(shape=model.shape, rows=rows), shapes)
    assert "has tensors that the weight table does not use" in said


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False, which the trainer cannot do"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"n_group": 3}, "n_group=3, topk_group=2 with 8 experts"),
        ("deepseek_v3", {"num_experts_per_tok": 6}, "num_experts_per_tok to be twice topk_group"),
        ("deepseek_v3", {"n_group": 1, "num_experts_per_tok": 1}, "it needs 2 or more, at most all"),
        ("deepseek_v3", {"n_group": 1, "num_experts_per_tok": 9}, "it needs 2 or more, at most all"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7; it needs an even number"),
        ("deepseek_v3", {"kv_lora_rank": None, "v_head_dim": 0}, "v_head_dim=0"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2}}, "RoPE scaling .*linear"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale_all_dim": 0}}, "mscale_all_dim above 0"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "attention_factor": 2}}, "RoPE scaling .*attention_factor"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 2}}, "RoPE scaling .*yarn"),
        ("deepseek_v3", {"rope_scaling": "yarn"}, "RoPE scaling yarn"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1"),
        ("glm4_moe", {"partial_rotary_factor": 0}, "partial_rotary_factor=0"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ("glm4_moe", {"rope_scaling": {"type": "yarn"}}, "RoPE scaling"),
        ("glm4_moe", {"partial_rotary_factor": 0.01}, "0.16 of the 16 elements of a head"),
        ("glm4_moe", {"partial_rotary_factor": 0.1875}, "3 of the 16 elements of a head"),
        ("glm4_moe", {"use_qk_norm": "true"}, "use_qk_norm='true'; it needs true or false"),
        ("glm4_moe", {"attention_bias": 1}, "attention_bias=1; it needs true or false"),
        ("glm4_moe", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false'; it needs true or false"),
        ("glm4_moe", {"layer_types": 5}, "layer_types=5; it needs a list of names"),
        ("glm4_moe", {"num_hidden_layers": 10**9}, "num_hidden_layers=a number that is too large"),
        ("glm4_moe", {"n_routed_experts": 10**9}, "n_routed_experts=a number that is too large"),
        ("glm4_moe", {"num_nextn_predict_layers": 10**7}, "predict_layers=a number that is too large"),
        ("glm4_moe", {"hidden_size": 10**400}, "hidden_size=a number that is too large"),
        ("glm4_moe", {"rms_norm_eps": 10**400}, "rms_norm_eps=10"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor=0; it needs a number above 0"),
        ("deepseek_v3", {"rope_theta": 0}, "rope_theta=0; it needs a number above 0"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "factor": 0.5}}, "with factor of 1 or more"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "beta_slow": 40}}, "beta_fast of beta_slow or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, kind: str, values: dict, says: str) -> None:
    sizes = DEEPSEEK if kind == "deepseek_v3" else GLM
    with pytest.raises(ConfigError, match=says):
        read_model(written(tmp_path, **{"model_type": kind, **sizes, **values}))


KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 163584,
    "eos_token_id": 163585, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
"""The config.json of https://huggingface.co/moonshotai/Kimi-K2-Instruct."""


def test_kimi_k2_as_released_has_the_elements_of_transformers(tmp_path: Path) -> None:
    model = read_model(written(tmp_path, **KIMI_K2))
    config = config_of_classes(str(tmp_path))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    ours = sum(math.prod(row.full_shape) for row in model.rows if not row.is_fixed)
    assert ours == theirs.num_parameters() and round(ours / 1e9) == 1026
    yarn, rope = model.shape.yarn, config.rope_parameters
    assert yarn is not None and (yarn.beta_fast, yarn.beta_slow, yarn.factor) == (1.0, 1.0, 32.0)
    assert all(rope[key] == value for key, value in KIMI_K2["rope_scaling"].items() if key != "type")
    assert (rope["rope_type"], rope["rope_theta"]) == ("yarn", model.shape.rope_theta)


def test_kimi_k2_with_weights_of_four_bits_is_refused(tmp_path: Path) -> None:
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    with pytest.raises(ConfigError, match="quantization_config"):
        read_model(written(tmp_path, **KIMI_K2 | {"quantization_config": packed}))
