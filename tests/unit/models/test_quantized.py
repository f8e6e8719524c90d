"""FP8 with a scale for each block: what is accepted, what it means, what a trained policy's folder says."""

import json

import pytest
import torch

from yatt.errors import ConfigError
from yatt.models.quantized import exported_config, is_quantised, scale_faults, scale_shape, without_scales
from yatt.weights.convert import dequantised_weight

RELEASED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def test_the_released_form_is_accepted_and_others_are_refused() -> None:
    assert not is_quantised({}) and not is_quantised({"quantization_config": None})
    assert is_quantised({"quantization_config": RELEASED})
    for changed in (
        {**RELEASED, "quant_method": "awq"},
        {**RELEASED, "weight_block_size": [64, 64]},
        {**RELEASED, "fmt": "e5m2"},
        {"quant_method": "fp8"},
        {},
        "fp8",
    ):
        with pytest.raises(ConfigError, match=r"quantization_config=.*, or the model in bfloat16"):
            is_quantised({"quantization_config": changed})


@pytest.mark.parametrize("shape", [(128, 128), (130, 300), (1, 257), (256, 5)])
def test_each_element_is_multiplied_with_its_blocks_scale(shape: tuple[int, int]) -> None:
    chance = torch.Generator().manual_seed(sum(shape))
    weight = (torch.randn(shape, generator=chance) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape(shape), generator=chance) + 0.01
    found = dequantised_weight(weight, scales)
    for row in range(0, shape[0], 29):
        for column in range(0, shape[1], 31):
            scale = scales[row // 128, column // 128].item()
            expected = torch.tensor(weight[row, column].float().item()) * torch.tensor(scale)
            assert found[row, column] == expected


def test_scales_of_another_shape_are_refused() -> None:
    weight = torch.zeros(130, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"has scales of shape \(1, 1\); \(2, 1\) is needed"):
        dequantised_weight(weight, torch.ones(1, 1))


def test_scales_that_are_not_finite_are_refused() -> None:
    weight = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="scales that are not finite"):
        dequantised_weight(weight, torch.tensor([[float("nan")]]))


def test_a_weight_without_its_scales_is_named() -> None:
    shapes = {"a.weight": (130, 64), "a.weight_scale_inv": (2, 1), "norm": (64,)}
    dtypes = {"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32", "norm": "BF16"}
    assert scale_faults(shapes, dtypes) == []
    assert without_scales(shapes, dtypes) == {"a.weight": (130, 64), "norm": (64,)}
    (said,) = scale_faults(shapes | {"a.weight_scale_inv": (1, 1)}, dtypes)
    assert "a.weight in FP8 without its scales a.weight_scale_inv of shape (2, 1)" in said
    assert scale_faults({"b": (64,), "b_scale_inv": (1,)}, {"b": "F8_E4M3"}), "a vector has none"
    assert without_scales({"x_scale_inv": (1,)}, {"x_scale_inv": "F32"}) == {"x_scale_inv": (1,)}


def test_a_trained_policy_is_not_quantised_and_predicts_one_token() -> None:
    values = {
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "quantization_config": RELEASED,
        "x": [1],
    }
    exported = json.loads(exported_config(json.dumps(values).encode(), "bfloat16"))
    plain = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0, "x": [1]}
    assert exported == {**plain, "torch_dtype": "bfloat16"}
    unchanged = b'{"model_type":  "qwen3", "dtype": "float32"}'
    assert exported_config(unchanged, "float32") is unchanged
    assert json.loads(exported_config(unchanged, "bfloat16"))["dtype"] == "bfloat16"
