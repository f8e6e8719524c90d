"""Mixtures of experts: config.json is read as transformers reads it, and the table names what is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.tiny_models import saved_shapes
from yatt.errors import ConfigError
from yatt.models.model import model_of, read_model
from yatt.models.shape import DenseFeedForward, Experts
from yatt.models.tensors import tensor_faults

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
         "intermediate_size": 96, "vocab_size": 99, "num_experts": 6, "num_experts_per_tok": 2,
         "moe_intermediate_size": 24}  # fmt: skip
KINDS = ("qwen3_moe", "qwen2_moe")


def written(folder: Path, **values: Any) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "values",
    [
        {},
        SIZES,
        {**SIZES, "norm_topk_prob": True, "mlp_only_layers": [0, 2]},
        {**SIZES, "decoder_sparse_step": 2, "mlp_only_layers": None},
        {**SIZES, "shared_expert_intermediate_size": 40, "rms_norm_eps": 1e-5},
    ],
)
def test_what_is_left_out_means_what_transformers_means(tmp_path: Path, kind: str, values: dict) -> None:
    folder = written(tmp_path, model_type=kind, **values)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert read_model(folder) == model_of(theirs)
    shape = read_model(folder).shape
    assert shape.is_regular
    experts = shape.experts
    assert experts is not None
    assert (experts.num_experts, experts.top_k, experts.size, experts.normalizes) == (
        theirs.num_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size, theirs.norm_topk_prob,
    )  # fmt: skip
    is_shared = kind == "qwen2_moe"
    assert experts.shared_size == (theirs.shared_expert_intermediate_size if is_shared else 0)
    assert experts.has_shared_gate == is_shared


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_every_tensor_that_is_saved_and_which_layers_have_experts(
    tmp_path: Path, kind: str
) -> None:
    config = transformers.AutoConfig.for_model(
        kind, **SIZES, decoder_sparse_step=1, mlp_only_layers=[1], shared_expert_intermediate_size=40
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = read_model(str(tmp_path))
    shapes = saved_shapes(tmp_path)
    assert list(tensor_faults(model, shapes)) == []
    kinds = [type(layer.feed_forward) for layer in model.shape.layers]
    assert kinds == [Experts, DenseFeedForward, Experts]
    assert len([row for row in model.rows if ".mlp.experts.5." in row.name]) == 2 * 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_experts": 0}, "num_experts=0; it needs a whole number of 1 or more"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7, more than the 6 experts"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\]; it needs a list of layers, 0 to 2"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers='all'"),
        ({"moe_intermediate_size": 1.5}, "moe_intermediate_size=1.5"),
        ({"decoder_sparse_step": -1}, "decoder_sparse_step=-1"),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, "qkv_bias=False, which the trainer cannot do"),
        (
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size=0",
        ),
        ({"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_what_cannot_be_honoured_is_refused_from_the_file(tmp_path: Path, values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_model(written(tmp_path, **{"model_type": "qwen3_moe", **SIZES, **values}))


MIXTRAL = {key: value for key, value in SIZES.items() if key not in ("num_experts", "moe_intermediate_size")}


@pytest.mark.parametrize("values", [{}, MIXTRAL, {**MIXTRAL, "num_local_experts": 4, "head_dim": 32}])
def test_a_mixtral_config_means_what_transformers_means(tmp_path: Path, values: dict) -> None:
    folder = written(tmp_path, model_type="mixtral", **values)
    theirs, shape = transformers.AutoConfig.from_pretrained(folder), read_model(folder).shape
    assert shape == model_of(theirs).shape
    experts = shape.experts
    assert experts is not None and shape.is_regular and shape.dense is None
    assert (experts.num_experts, experts.top_k, experts.size, experts.normalizes) == (
        theirs.num_local_experts, theirs.num_experts_per_tok, theirs.intermediate_size, True,
    )  # fmt: skip
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"]


def test_the_table_of_a_mixtral_has_the_released_names_of_every_tensor(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("mixtral", **MIXTRAL, num_local_experts=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, shapes = read_model(str(tmp_path)), saved_shapes(tmp_path)
    assert list(tensor_faults(model, shapes)) == []
    assert "model.layers.2.block_sparse_moe.experts.3.w2.weight" in shapes
