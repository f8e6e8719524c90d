"""Fusing, cutting, joining and unfusing give back every bit; what is not supported is named."""

import pytest
import torch
import transformers

from tests.property.test_boxes import dim_of
from yatt.errors import ConfigError
from yatt.models.model import model_of, read_model
from yatt.weights.convert import HFTensors, cut_shard, fuse_tensors, join_shards, pick_tensors

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 62,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_tensor_of_the_model_goes_in_and_comes_out_bit_for_bit(kind, size):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    ours, source = model_of(CONFIGS[kind]), model.state_dict()
    back = {}
    for row in ours.rows:
        full, dim = fuse_tensors(row, [source[name] for name in row.hf_names]), dim_of(row)
        assert tuple(full.shape) == row.full_shape
        shards = [cut_shard(row, full, dim, rank=rank, size=size) for rank in range(size)]
        joined = join_shards(row, shards, dim)[: full.shape[0]]
        back |= dict(zip(row.hf_names, pick_tensors(row, joined), strict=True))
    wanted = {name for name in source if not (ours.shape.is_tied and name == "lm_head.weight")}
    assert set(back) == wanted
    assert [name for name in wanted if not torch.equal(back[name], source[name])] == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            transformers.GPT2Config(),
            "architecture 'gpt2' is not supported; use one of llama, mistral, mixtral, qwen2, qwen3",
        ),
        (transformers.LlamaConfig(**SIZES, attention_bias=True), "attention_bias=True"),
        (transformers.LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias=True"),
        (transformers.LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act='gelu'"),
        (transformers.LlamaConfig(**SIZES, sliding_window=7), "sliding_window=7"),
        (
            transformers.LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
            ),
            "RoPE scaling",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(config, says):
    with pytest.raises(ConfigError, match=says):
        model_of(config)


def test_a_folder_that_is_no_model_is_the_users_mistake(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        HFTensors(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "never-heard-of"}')
    with pytest.raises(ConfigError, match="architecture 'never-heard-of' is not supported"):
        read_model(str(tmp_path))


def test_a_missing_tensor_is_named(tmp_path):
    transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen3"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no tensor lm_head\.bias"):
        HFTensors(str(tmp_path)).read("lm_head.bias")


def test_llama3_rope_scaling_is_read():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = model_of(transformers.LlamaConfig(**SIZES, rope_parameters=rope)).shape
    assert (shape.rope_theta, shape.rope_scaling_factor) == (5e5, 8.0)
