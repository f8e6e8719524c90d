"""The count of operations against torch's own count of what transformers computes, for every family."""

import json
import math

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny_models import CLASSES_OF
from tests.tiny_vision import KINDS, config_of
from yatt.models.families import FAMILIES
from yatt.models.flops import (
    BACKWARD,
    attention_flops,
    forward_flops,
    picture_flops,
    training_flops,
)
from yatt.models.model import model_of

LENGTH, ROWS = 24, 9
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
OF_FAMILY = {
    "llama": {},
    "mistral": {"sliding_window": 10},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2": {
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 32, "num_local_experts": 6},
    "qwen2_moe": {**EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 40},
    "glm4_moe": {**SIGMOID, "head_dim": 32},
    "deepseek_v3": {
        **SIGMOID,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
}
OF_FAMILY |= {
    "olmo2": {"pad_token_id": None},
    "olmo3": {
        "pad_token_id": None, "sliding_window": 7,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "minimax_m2": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 12,
        "scoring_func": "sigmoid", "use_routing_bias": True,
    },
}  # fmt: skip
OF_FAMILY["kimi_k2"] = OF_FAMILY["deepseek_v3"]


def counted(kind: str, length: int, *, is_trained: bool) -> tuple[object, int]:
    """The config, and torch's count with logits at the last `ROWS` positions."""
    config = transformers.AutoConfig.for_model(CLASSES_OF.get(kind, kind), **{**TINY, **OF_FAMILY[kind]})
    settings = {"attn_implementation": "eager"}
    if "moe" in kind or kind in ("mixtral", "deepseek_v3", "kimi_k2", "minimax_m2"):
        settings["experts_implementation"] = "eager"  # else experts are not separate products
    model = transformers.AutoModelForCausalLM.from_config(config, **settings)
    ids = torch.arange(length)[None] % config.vocab_size
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(is_trained):
        logits = model(ids, logits_to_keep=ROWS, use_cache=False).logits
        if is_trained:
            logits.sum().backward()
    return config, counter.get_total_flops()


def masked(config, length: int) -> int:
    """Operations on pairs that the mask hides, which an eager attention computes nevertheless."""
    shape = model_of(config).shape
    hidden = 0
    for layer in shape.layers:
        _, of_pair = attention_flops(layer.attention, shape.hidden_size)
        seen = [min(place, layer.attention.window or place) for place in range(1, length + 1)]
        hidden += of_pair * (length**2 - sum(seen))
    return hidden


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.tower is None])
@pytest.mark.parametrize("length", [ROWS, LENGTH])
def test_a_forward_pass_has_the_operations_that_torch_counts(kind: str, length: int) -> None:
    config, total = counted(kind, length, is_trained=False)
    expected = forward_flops(model_of(config).shape).of_sequence(length, ROWS) + masked(config, length)
    assert total == expected


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.tower is None])
def test_an_update_has_the_operations_that_torch_counts(kind: str) -> None:
    config, total = counted(kind, LENGTH, is_trained=True)
    expected = training_flops(forward_flops(model_of(config).shape), [(LENGTH, ROWS)])
    expected += (1 + BACKWARD) * masked(config, LENGTH)
    assert total == expected


def test_tiles_have_the_operations_that_torch_counts() -> None:
    config = config_of("internvl")
    model = transformers.InternVLModel(config)
    model.vision_tower.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.get_image_features(
            torch.zeros(3, 3, 56, 56), vision_feature_layer=-1, vision_feature_select_strategy="default"
        )
    shape = model_of(json.loads(config.to_json_string())).shape
    assert picture_flops(shape, (3, 4, 4)) == counter.get_total_flops()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "internvl"])
def test_a_tower_has_the_operations_that_torch_counts(kind: str) -> None:
    """Every block attends to the whole picture here, since windows are left out."""
    config, grid = config_of(kind), (1, 8, 12)
    if kind == "qwen2_5_vl":
        config.vision_config.fullatt_block_indexes = [*range(config.vision_config.depth)]
    tower = transformers.AutoModel.from_config(config.vision_config, attn_implementation="eager")
    patch = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(torch.zeros(math.prod(grid), patch), grid_thw=torch.tensor([grid]))
    shape = model_of(json.loads(config.to_json_string())).shape
    assert picture_flops(shape, grid) == counter.get_total_flops()
