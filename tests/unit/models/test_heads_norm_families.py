"""OLMo-2, OLMo-3, MiniMax-M2: config.json is read as by transformers, the table has all that is saved."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.sliced_weights import spanning_config
from tests.tiny_models import make_windowed, saved_shapes
from tests.unit.models.test_model import run_file
from yatt.config.load import load_run_config
from yatt.config.schema import TrainerSection
from yatt.errors import ConfigError
from yatt.launch.checks.policy_check import check_policy
from yatt.models.cuts import cut_dim, engine_cuts
from yatt.models.model import Model, model_of, read_model
from yatt.models.quantized import exported_config, is_quantised
from yatt.models.tensors import tensor_faults
from yatt.trainer.mcore.layout import check_layout, check_spec

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 96,
    "vocab_size": 99, "num_key_value_heads": 2,
}  # fmt: skip
YARN = {
    "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
    "original_max_position_embeddings": 8192, "rope_type": "yarn",
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
NEEDED = {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True}
TINY_MINIMAX = {**SIZES, **NEEDED, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 6,
                "num_experts_per_tok": 2}  # fmt: skip
OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-6,
    "rope_scaling": YARN, "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 100278,
}  # fmt: skip
"""The config.json of https://huggingface.co/allenai/Olmo-3-7B-Think."""

MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 204800,
    "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "qk_norm_type": "per_layer", "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_cache": True, "use_mtp": True,
    "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
"""The config.json of https://huggingface.co/MiniMaxAI/MiniMax-M2.7."""


def written(folder: Path, **values: Any) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("olmo2", {}),
        ("olmo2", {**SIZES, "rope_theta": 5e5, "tie_word_embeddings": True}),
        ("olmo2", {**SIZES, "head_dim": 32, "rope_parameters": PLAIN}),
        ("olmo3", {}),
        ("olmo3", {**SIZES, "sliding_window": 8}),
        ("olmo3", {**SIZES, "rope_scaling": YARN, "rope_theta": 500000}),
        ("olmo3", {**SIZES, "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 1e4}, "sliding_attention": {**PLAIN, "rope_theta": 1e4},
        }}),
        ("minimax_m2", NEEDED),
        ("minimax_m2", {**TINY_MINIMAX, "rope_theta": 1e4}),
        ("minimax_m2", {**TINY_MINIMAX, "partial_rotary_factor": 0.5}),
    ],
)  # fmt: skip
def test_a_config_means_what_transformers_means(tmp_path: Path, kind: str, values: dict) -> None:
    folder = written(tmp_path, model_type=kind, **values)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    read = read_model(folder)
    assert read == model_of(theirs)
    shape, attention = read.shape, read.shape.attention
    assert shape.is_regular and shape.needs_torch_spec and shape.norms_after == (kind != "minimax_m2")
    assert (attention.num_heads, attention.num_kv_heads) == (
        theirs.num_attention_heads, theirs.num_key_value_heads,
    )  # fmt: skip
    assert (shape.vocab_size, shape.norm_eps) == (theirs.vocab_size, theirs.rms_norm_eps)
    rope = theirs.rope_parameters
    if kind == "olmo3":
        narrow = [kind == "sliding_attention" for kind in theirs.layer_types]
        assert shape.windows == tuple(theirs.sliding_window * is_narrow for is_narrow in narrow)
        assert {each["rope_theta"] for each in rope.values()} == {shape.rope_theta}
        assert (shape.yarn is not None) == (rope["full_attention"]["rope_type"] == "yarn")
        return
    assert shape.rope_theta == rope["rope_theta"] and not any(shape.windows)
    assert shape.rotary_share == rope.get("partial_rotary_factor", 1.0)
    if kind == "minimax_m2":
        experts = shape.experts
        assert (experts.num_experts, experts.top_k, experts.size, experts.shared_size) == (
            theirs.num_local_experts, theirs.num_experts_per_tok, theirs.intermediate_size, 0,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values"), [("olmo2", SIZES), ("olmo3", SIZES), ("minimax_m2", TINY_MINIMAX)]
)
def test_the_table_has_every_tensor_that_is_saved(tmp_path: Path, kind: str, values: dict) -> None:
    config = transformers.AutoConfig.for_model(kind, **{**values, "pad_token_id": None})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert list(tensor_faults(read_model(str(tmp_path)), saved_shapes(tmp_path))) == []


def num_elements(folder: str) -> tuple[Model, int]:
    """A model as released, and the number of transformers' parameters."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    return read_model(folder), theirs.num_parameters()


def test_olmo_3_as_released_has_the_elements_and_angles_of_transformers(tmp_path: Path) -> None:
    """The angles of each kind of layer, at positions before and after the length trained on."""
    from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

    from yatt.trainer.mcore.rotary_axes import yarn_frequencies

    model, count = num_elements(written(tmp_path, **OLMO3))
    assert sum(math.prod(row.full_shape) for row in model.rows) == count == 7_298_011_136
    theirs = Olmo3RotaryEmbedding(transformers.AutoConfig.from_pretrained(str(tmp_path)))
    shape, yarn = model.shape, model.shape.yarn
    assert shape.windows == (4096, 4096, 4096, 0) * 8 and yarn is not None
    plain = 1 / shape.rope_theta ** (torch.arange(0, 128, 2) / 128)
    assert torch.allclose(plain, theirs.sliding_attention_inv_freq, rtol=1e-6, atol=0)
    stretched = yarn_frequencies(plain, shape.rope_theta, yarn)
    assert torch.allclose(stretched, theirs.full_attention_inv_freq, rtol=1e-6, atol=0)
    assert not torch.allclose(stretched, plain, rtol=1e-2, atol=0)
    assert yarn.position_scale == pytest.approx(theirs.full_attention_attention_scaling, abs=1e-12)
    assert theirs.sliding_attention_attention_scaling == 1


@pytest.mark.parametrize(
    "values",
    [
        {"beta_fast": 4.0}, {"factor": 2.0}, {"attention_factor": None}, {"beta_fast": 1.0},
        {"original_max_position_embeddings": 64}, {"factor": 64.0, "original_max_position_embeddings": 4},
    ],
)  # fmt: skip
def test_stretched_frequencies_are_transformers(tmp_path: Path, values: dict) -> None:
    from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

    from yatt.trainer.mcore.rotary_axes import yarn_frequencies

    scaling = {key: value for key, value in {**YARN, **values}.items() if value is not None}
    folder = written(tmp_path, model_type="olmo3", **SIZES, rope_scaling=scaling)
    theirs = Olmo3RotaryEmbedding(transformers.AutoConfig.from_pretrained(folder))
    shape = read_model(folder).shape
    plain = 1 / shape.rope_theta ** (torch.arange(0, 16, 2) / 16)
    assert shape.yarn is not None
    found = yarn_frequencies(plain, shape.rope_theta, shape.yarn)
    assert torch.allclose(found, theirs.full_attention_inv_freq, rtol=1e-6, atol=0)
    assert shape.yarn.position_scale == pytest.approx(theirs.full_attention_attention_scaling, abs=1e-12)


def test_minimax_m2_as_released_has_the_elements_of_transformers(tmp_path: Path) -> None:
    assert is_quantised(MINIMAX), "its files are in FP8, which is read"
    exported = json.loads(exported_config(json.dumps(MINIMAX).encode(), "bfloat16"))
    assert exported["num_mtp_modules"] == 0 and "quantization_config" not in exported
    model, count = num_elements(written(tmp_path, **exported))
    assert model.rows == model_of(MINIMAX).rows and model_of(MINIMAX).shape.num_extra_layers == 3
    ours = sum(math.prod(row.full_shape) for row in model.rows if not row.is_fixed)
    assert ours == count and round(ours / 1e9) == 229
    names = {name for row in model.rows for name in row.hf_names}
    assert {
        f"model.layers.61.{leaf}" for leaf in (
            "block_sparse_moe.e_score_correction_bias", "block_sparse_moe.gate.weight",
            "block_sparse_moe.experts.255.w2.weight", "self_attn.k_norm.weight",
        )
    } < names  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("olmo2", {"attention_bias": True}, "attention_bias=True, which the trainer cannot do for olmo2"),
        ("olmo2", {"sliding_window": 7}, "sliding_window=7, which the trainer cannot do for olmo2"),
        ("olmo2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "RoPE scaling .*yarn"),
        ("olmo3", {"sliding_window": None}, "sliding_window=None; it needs a whole number"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "layer_types with 'chunked_attention'"),
        ("olmo3", {"rope_theta": 1e4}, "rope_theta=10000 for layers without a window and 500000 for those"),
        (
            "olmo3", {"rope_parameters": {"full_attention": {**PLAIN, "rope_theta": 1e4}}},
            "the trainer needs the same for both",
        ),
        ("olmo3", {"rope_parameters": PLAIN}, "rope_parameters=.* is not supported; layers with a window"),
        ("olmo3", {"rope_parameters": {"sliding_attention": YARN}}, "with a window .* need rope_type 'def"),
        ("olmo3", {"rope_scaling": {**YARN, "mscale": 1.0}}, "is not supported"),
        ("olmo3", {"rope_scaling": {**YARN, "truncate": False}}, "is not supported"),
        ("olmo3", {"rope_scaling": {**YARN, "rope_type": "llama3"}}, "is not supported"),
        ("olmo3", {"rope_scaling": {**YARN, "factor": 1.0}}, "with factor above 1"),
        ("olmo3", {"rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_fast of beta_slow or more"),
        ("olmo3", {"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor=0; it needs a number"),
        ("olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "original_max_position_embeddings"),
        ("olmo3", {"rope_scaling": "yarn"}, "rope_scaling=yarn is not supported"),
        ("olmo3", {"rope_parameters": "default"}, "is not supported"),
        ("minimax_m2", {"rotary_dim": None}, "says no rotary_dim; write the number"),
        ("minimax_m2", {"rotary_dim": 7}, "rotary_dim=7 of the 16 elements of a head"),
        ("minimax_m2", {"rotary_dim": 32}, "rotary_dim=32 of the 16 elements of a head"),
        ("minimax_m2", {"partial_rotary_factor": 0.25}, "rotary_dim=8 .* partial_rotary_factor=0.25"),
        ("minimax_m2", {"scoring_func": None}, "scoring_func=None, .* it needs 'sigmoid'"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax', .* it needs 'sigmoid'"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False, .* it needs True"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False, .* it needs True"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head', .* it needs 'per_layer'"),
        ("minimax_m2", {"attn_type_list": [1, 1, 0, 1]}, "attn_type_list=.* it needs 1"),
        ("minimax_m2", {"attn_type_list": 1}, "attn_type_list=1"),
        ("minimax_m2", {"attention_output_gate": True}, "attention_output_gate=True"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size=64, .* it needs 0"),
        ("minimax_m2", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("minimax_m2", {"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta=3.5, .* it needs 1.0"),
        ("minimax_m2", {"sliding_window": 7}, "sliding_window=7"),
        ("minimax_m2", {"num_experts_per_tok": 1}, "it needs 2 or more, at most all"),
        ("minimax_m2", {"num_local_experts": 0}, "num_local_experts=0; it needs a whole number"),
        ("minimax_m2", {"num_mtp_modules": -1}, "num_mtp_modules=-1"),
        ("minimax_m2", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "quantization_conf"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, kind: str, values: dict, says: str) -> None:
    sizes = TINY_MINIMAX if kind == "minimax_m2" else SIZES
    with pytest.raises(ConfigError, match=says):
        read_model(written(tmp_path, **{"model_type": kind, **sizes, **values}))


def layout(tp: int) -> TrainerSection:
    steps = {"total_iterations": 1, "train_batch_size": 1, "mini_batch_size": 1}
    return TrainerSection(**steps, tensor_model_parallel_size=tp, sequence_parallel=tp > 1)


@pytest.mark.parametrize("kind", ["olmo2", "olmo3", "minimax_m2"])
def test_fewer_key_heads_than_ranks_and_layers_of_transformer_engine_are_refused(kind: str) -> None:
    values = TINY_MINIMAX if kind == "minimax_m2" else SIZES
    shape = model_of({"model_type": kind, **values}).shape
    check_layout(shape, layout(2), 2)
    with pytest.raises(ConfigError, match="tensor_model_parallel_size 4 does not divide 2 key/value heads"):
        check_layout(shape, layout(4), 4)
    with pytest.raises(ConfigError, match=r"model\.spec: Transformer Engine's layers have no norm over all"):
        check_spec(shape, "te")
    check_spec(shape, "auto")
    check_spec(model_of({**SIZES, "model_type": "llama"}).shape, "te")


def test_ranks_cut_norms_over_all_heads_and_nodes_of_engines_have_them_whole() -> None:
    """Some of vLLM's classes have them whole on each rank, and cut a key's head where it has too few."""
    model = model_of({"model_type": "olmo2", **SIZES, "hidden_size": 128})
    norms = [row for row in model.rows if row.name.endswith("_layernorm.heads_weight")]
    assert {cut_dim(row) for row in norms} == {0} and [row.num_rows for row in norms[:2]] == [128, 64]
    for tp_size, unknown in ((2, set()), (4, {"q_proj", "k_proj", "v_proj"})):
        config = spanning_config("m", tp_size=tp_size, node_ranks=1)
        found = engine_cuts(config, model.rows, model.shape)
        assert {name.split(".")[-2] for name in found.unknown} == unknown
        assert not [name for name in found.cuts if "norm" in name]
        assert any("o_proj" in name for name in found.cuts)


def test_what_layers_or_engines_do_not_have_is_refused_before_the_start(tmp_path: Path) -> None:
    make_windowed(tmp_path / "policy", "minimax_m2")
    (tmp_path / "train.jsonl").write_text('{"prompt": "one plus one is"}\n')
    run = run_file(tmp_path)
    wrong = {
        "model.spec=te": r"^model\.spec: Transformer Engine's layers",
        "launch.device=cpu": r"^rollout\.engine: vLLM on CPUs cannot run .*write transformers",
    }
    for setting, says in wrong.items():
        with pytest.raises(ConfigError, match=says):
            check_policy(load_run_config([run], [setting]))
    check_policy(load_run_config([run], ["launch.device=cpu", "rollout.engine=transformers"]))
