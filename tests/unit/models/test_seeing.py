"""Models that take pictures: their shape and weight table against real files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.tiny_vision import KINDS, make_vision_model
from yatt.errors import ConfigError
from yatt.models.families import FAMILIES
from yatt.models.folder import takes_pictures
from yatt.models.model import Model, check_parameter_rows, model_of, read_model
from yatt.models.rows import EMBEDDING, Part, Stacked, WeightRow, vocabulary_row
from yatt.models.tensors import file_shapes, tensor_faults

QWEN2_5_7B = {
    "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
    "vocab_size": 152064, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False,
    "sliding_window": 32768, "max_window_layers": 28, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "attention_dropout": 0.0,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
"""As released, with the decoder's keys at the top."""

QWEN3_8B = {
    "model_type": "qwen3_vl", "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "vocab_size": 151936,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
        "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


QWEN3_30B_A3B = {
    **QWEN3_8B, "model_type": "qwen3_vl_moe",
    "text_config": QWEN3_8B["text_config"] | {
        "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "vision_config": QWEN3_8B["vision_config"] | {"out_hidden_size": 2048, "model_type": "qwen3_vl_moe"},
}  # fmt: skip


GLM_4_5V = {
    "model_type": "glm4v_moe", "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": True, "attention_dropout": 0.0, "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
        "max_position_embeddings": 65536, "model_type": "glm4v_moe_text", "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000,
        "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}, "routed_scaling_factor": 1.0,
        "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
    },
    "vision_config": {
        "attention_bias": False, "attention_dropout": 0.0, "depth": 24, "hidden_act": "silu",
        "hidden_size": 1536, "image_size": 336, "in_channels": 3, "initializer_range": 0.02,
        "intermediate_size": 10944, "model_type": "glm4v_moe", "num_heads": 12, "out_hidden_size": 4096,
        "patch_size": 14, "rms_norm_eps": 1e-5, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


INTERN_8B = {
    "model_type": "internvl", "tie_word_embeddings": False, "image_token_id": 151667,
    "image_seq_length": 256, "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu", "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
    "text_config": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151674,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "max_window_layers": 70,
        "use_sliding_window": False, "sliding_window": None,
    },
    "vision_config": {
        "model_type": "internvl_vision", "attention_bias": True, "hidden_size": 1024,
        "image_size": [448, 448], "patch_size": [14, 14], "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096, "norm_type": "layer_norm", "use_qk_norm": False, "use_mean_pooling": True,
        "use_mask_token": False, "use_absolute_position_embeddings": True, "layer_norm_eps": 1e-6,
        "dropout": 0.0, "initializer_factor": 0.1,
    },
}  # fmt: skip
"""InternVL3-8B, with what OpenGVLab's own converter writes beside."""


def shapes_in(folder: str) -> dict[str, tuple[int, ...]]:
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found


def num_elements(model: Model) -> int:
    return sum(row.num_rows * (row.width or 1) for row in model.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_every_tensor_of_the_files_with_its_shape(tmp_path: Path, kind: str) -> None:
    folder = make_vision_model(tmp_path / kind, kind)
    model, shapes = read_model(folder), shapes_in(folder)
    assert list(tensor_faults(model, shapes)) == []
    conv = next(row for row in model.rows if "vision." in row.name and len(row.tail) > 2)
    assert conv.full_shape == (64, conv.width) and len(conv.tail) == (3 if kind == "internvl" else 4)
    assert takes_pictures(folder)
    shapes.pop(next(name for name in shapes if "visual.blocks.1" in name or "encoder.layer.1" in name))
    assert len(list(tensor_faults(model, shapes))) == 1


def test_released_configs_have_the_released_number_of_elements() -> None:
    assert num_elements(model_of(QWEN2_5_7B)) == 8_292_166_656
    assert num_elements(model_of(QWEN3_8B)) == 8_767_123_696
    assert num_elements(model_of(QWEN3_30B_A3B)) == 31_070_754_032
    assert num_elements(model_of(GLM_4_5V)) == 107_710_933_120
    assert num_elements(model_of(INTERN_8B)) == 7_944_373_760


@pytest.mark.parametrize(
    "changes",
    [
        {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False},
        {"use_mean_pooling": False, "image_size": 224, "patch_size": 14},
    ],
)
def test_every_form_of_a_tower_for_tiles_has_the_tensors_of_transformers(changes: dict[str, Any]) -> None:
    import torch
    import transformers

    tokens = {"image_seq_length": 64 if "image_size" in changes else 256}
    config = INTERN_8B | tokens | {"vision_config": INTERN_8B["vision_config"] | changes}
    shape, rows = (model := model_of(config)).shape, {row.name: row for row in model.rows}
    with torch.device("meta"):
        vision = transformers.InternVLVisionConfig(**config["vision_config"])
        tower = transformers.AutoModel.from_config(vision)
    expected = {f"vision.vision_tower.{name}": each.shape for name, each in tower.named_parameters()}
    found = {name: row.file_shape for name, row in rows.items() if "vision_tower." in name}
    assert found == {name: tuple(each) for name, each in expected.items()}
    assert shape.rope_axes is None and shape.picture_merge == 0
    assert shape.picture_axes.sections == (64, 0, 0)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("downsample_ratio", 0.25, "downsample_ratio=0.25; it needs 0.5"),
        ("vision_feature_layer", -2, "vision_feature_layer=-2; it needs -1"),
        ("image_seq_length", 64, "image_seq_length=64; it needs 256"),
        ("text_config", 3, "has no text_config"),
        ("text_config.model_type", "llama", "model_type='llama'; it needs one of qwen2, qwen3, qwen3_moe"),
        ("text_config.rope_scaling", {"rope_type": "dynamic", "alpha": 3}, "rope_scaling with alpha, which"),
        (
            "text_config.rope_scaling",
            {"rope_type": "yarn", "factor": 2.0},
            "RoPE scaling .* is not supported",
        ),
        ("text_config.tie_word_embeddings", True, "tie_word_embeddings=False, and its text_config says True"),
        ("vision_config", None, "has no vision_config"),
        ("vision_config.drop_path_rate", 0.1, "vision_config.drop_path_rate=0.1; it needs 0.0"),
        ("vision_config.window", 7, "vision_config.window=7, which is not known"),
        ("vision_config.use_mask_token", True, "use_mask_token=True; it needs False"),
        ("vision_config.norm_type", "batch", "norm_type='batch'; it needs layer_norm or rms_norm"),
        ("vision_config.image_size", [448, 224], "it needs a square"),
        ("vision_config.image_size", 450, "image_size=450; it needs a multiple of 28"),
        ("vision_config.image_size", "448", "image_size='448'; it needs a whole number"),
        ("vision_config.num_attention_heads", 15, "num_attention_heads does not divide its hidden_size"),
        ("vision_config.use_qk_norm", "yes", "use_qk_norm='yes'; it needs true or false"),
    ],
)
def test_a_config_of_tiles_that_cannot_be_is_refused(key: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        model_of(changed(INTERN_8B, key, value))


def test_experts_of_a_layer_are_two_tensors_of_files_and_one_each_for_engines() -> None:
    model = model_of(QWEN3_30B_A3B)
    shapes, layer = file_shapes(model.rows), "model.language_model.layers.47.mlp.experts."
    assert shapes[layer + "gate_up_proj"] == (128, 2048, 1536)
    assert shapes[layer + "down_proj"] == (128, 768, 2048)
    names = {name for row in model.rows for name in row.hf_names}
    assert {layer + "127.gate_proj.weight", layer + "127.up_proj.weight"} <= names
    turned = {
        name: (shape[0], shape[2], shape[1]) if ".experts." in name else shape
        for name, shape in shapes.items()
    }
    assert list(tensor_faults(model, turned)) == [], "as transformers saves them"
    wrong = shapes | {layer + "down_proj": (128, 2048, 2048)}
    assert "down_proj with shape (128, 2048, 2048); its config.json promises" in "".join(
        tensor_faults(model, wrong)
    )


def test_a_mixture_whose_layers_are_all_dense_has_no_stack() -> None:
    model = model_of(changed(QWEN3_30B_A3B, "text_config.mlp_only_layers", [*range(48)]))
    assert model.shape.experts is None and not any(row.stacked for row in model.rows)


def row_of(index: int, count: int = 2, rows: int = 4, name: str = "stack", **more: Any) -> WeightRow:
    return WeightRow(
        name=f"row {index} {rows}", parts=(Part(f"part {index} {rows}", rows),), width=3,
        stacked=Stacked(name, index, count), **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    "rows",
    [
        [row_of(0)], [row_of(0), row_of(0, rows=8)], [row_of(0), row_of(2)], [row_of(0), row_of(1, rows=8)],
        [row_of(0), row_of(1, count=3)], [row_of(0, groups=2), row_of(1)],
        [row_of(0, name="part 1 4"), row_of(1, name="part 1 4")],
    ],
)  # fmt: skip
def test_a_table_with_a_tensor_of_files_that_is_never_whole_is_refused(rows: list[WeightRow]) -> None:
    whole = [row_of(0), row_of(1), vocabulary_row(EMBEDDING, "embedding", model_of(QWEN3_8B).shape)]
    check_parameter_rows(FAMILIES["qwen3_vl_moe"], tuple(whole))
    with pytest.raises(
        ConfigError, match="need to be its blocks, each once, matrices of one shape in one group"
    ):
        check_parameter_rows(FAMILIES["qwen3_vl_moe"], (*rows, whole[-1]))


def changed(config: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    copy = json.loads(json.dumps(config))
    *outer, last = key.split(".")
    place = copy
    for part in outer:
        place = place[part]
    place[last] = value
    return dict(copy)


@pytest.mark.parametrize(
    ("config", "key", "value", "says"),
    [
        (QWEN3_8B, "vision_config.new_key", 1, r"vision_config\.new_key=1, which is not known"),
        (QWEN3_8B, "vision_config.window_size", 112, r"vision_config\.window_size=112, which is not known"),
        (QWEN3_8B, "vision_config.hidden_act", "silu", "hidden_act='silu'; it needs 'gelu_pytorch_tanh'"),
        (QWEN3_8B, "vision_config.in_channels", 1, "in_channels=1; it needs 3"),
        (QWEN3_8B, "vision_config.out_hidden_size", 64, "out_hidden_size=64; it needs 4096"),
        (QWEN3_8B, "vision_config.depth", "27", "depth='27'; it needs a whole number"),
        (QWEN3_8B, "vision_config.deepstack_visual_indexes", [27], "it needs numbers of the tower's blocks"),
        (QWEN3_8B, "vision_config.deepstack_visual_indexes", 8, "it needs numbers of the tower's blocks"),
        (QWEN3_8B, "vision_config.num_heads", 7, "num_heads does not divide its hidden_size"),
        (QWEN3_8B, "vision_config", None, "has no vision_config"),
        (QWEN3_8B, "text_config.rope_scaling", None, "mrope_section=None; it needs a list of three"),
        (QWEN2_5_7B, "rope_scaling.mrope_section", [16, 24], "it needs a list of three"),
        (
            QWEN2_5_7B,
            "rope_scaling.mrope_section",
            [16, 24, 25],
            "its sum has to be half of the 128 elements",
        ),
        (QWEN2_5_7B, "use_sliding_window", True, "use_sliding_window=True"),
        (QWEN2_5_7B, "vision_config.spatial_patch_size", 16, "spatial_patch_size=16; it needs 14"),
        (
            GLM_4_5V,
            "text_config.use_qk_norm",
            True,
            "text_config needs use_qk_norm=false, which released models",
        ),
        (
            GLM_4_5V,
            "text_config.rope_scaling.mrope_section",
            [16, 24, 24],
            "half of the 64 elements of a head",
        ),
        (GLM_4_5V, "vision_config.attention_bias", True, "attention_bias=True; it needs False"),
        (GLM_4_5V, "vision_config.image_size", 10, "image_size=10, below patch_size=14"),
        (GLM_4_5V, "vision_config.image_size", 0, "image_size=0; it needs a whole number"),
        (QWEN3_30B_A3B, "text_config.norm_topk_prob", None, "text_config needs norm_topk_prob=true"),
        (QWEN3_30B_A3B, "text_config.moe_intermediate_size", 1024, "experts are transposed in the files"),
        (QWEN3_30B_A3B, "text_config.moe_intermediate_size", 2048, "experts are transposed in the files"),
    ],
)
def test_settings_that_are_not_implemented_are_refused_by_name(
    config: dict[str, Any], key: str, value: object, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        model_of(changed(config, key, value))
