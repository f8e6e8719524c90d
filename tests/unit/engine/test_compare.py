"""Comparing what an engine holds with what was published."""

import pytest
import torch

from yatt.engine.weights.compare import compare_weights
from yatt.weights.checksum import tensor_checksum

torch.manual_seed(1)
TENSORS = {
    "layers.0.v_proj.weight": torch.randn(2, 8),
    "layers.0.q_proj.weight": torch.randn(4, 8),
    "layers.0.k_proj.weight": torch.randn(2, 8),
    "layers.0.up_proj.weight": torch.randn(6, 8),
    "layers.0.gate_proj.weight": torch.randn(6, 8),
    "layers.0.down_proj.weight": torch.randn(8, 6),
    "norm.weight": torch.randn(8),
    "embed.weight": torch.randn(10, 8),
}
PUBLISHED = {name: tensor_checksum(tensor) for name, tensor in TENSORS.items()}


def held(**changed):
    """As an engine has them: fused, and the vocabulary padded to 16 rows."""
    layer = {name.removeprefix("layers.0.").removesuffix(".weight"): t for name, t in TENSORS.items()}
    return {
        "layers.0.qkv_proj.weight": torch.cat([layer[f"{each}_proj"] for each in "qkv"]),
        "layers.0.gate_up_proj.weight": torch.cat([layer["gate_proj"], layer["up_proj"]]),
        "layers.0.down_proj.weight": layer["down_proj"].clone(),
        "norm.weight": TENSORS["norm.weight"].clone(),
        "embed.weight": torch.cat([TENSORS["embed.weight"], torch.zeros(6, 8)]),
        "engine.own": torch.zeros(3),
    } | changed


def test_the_same_weights_are_the_same_however_they_are_fused():
    comparison = compare_weights(held().items(), PUBLISHED)
    assert (comparison.differing, comparison.num_compared) == ((), len(TENSORS))


@pytest.mark.parametrize(
    ("place", "row", "name"),
    [
        ("layers.0.qkv_proj.weight", 0, "layers.0.q_proj.weight"),
        ("layers.0.qkv_proj.weight", 5, "layers.0.k_proj.weight"),
        ("layers.0.qkv_proj.weight", 7, "layers.0.v_proj.weight"),
        ("layers.0.gate_up_proj.weight", 5, "layers.0.gate_proj.weight"),
        ("layers.0.gate_up_proj.weight", 6, "layers.0.up_proj.weight"),
        ("layers.0.down_proj.weight", 2, "layers.0.down_proj.weight"),
        ("norm.weight", 2, "norm.weight"),
        ("embed.weight", 9, "embed.weight"),
    ],
)
def test_a_single_differing_bit_is_found_and_its_place_named(place, row, name):
    weights = held()
    weights[place][row].view(torch.int32).view(-1)[0] ^= 1
    assert compare_weights(weights.items(), PUBLISHED).differing == (name,)


def test_what_is_sliced_repacked_or_of_another_dtype_is_not_compared():
    weights = {
        "layers.0.qkv_proj.weight": torch.randn(4, 8),
        "layers.0.down_proj.weight": torch.randn(0),
        "layers.0.gate_up_proj.weight": torch.randn(13, 8),
        "norm.weight": TENSORS["norm.weight"].bfloat16(),
        "embed.weight": torch.randn(5, 8),
    }
    comparison = compare_weights(weights.items(), PUBLISHED)
    assert (comparison.differing, comparison.num_compared) == ((), 0)


def test_a_tensor_without_a_known_checksum_is_not_compared():
    some = {
        name: text.rpartition("/")[0] + "/" if "proj" in name else text for name, text in PUBLISHED.items()
    }
    weights = held()
    weights["layers.0.qkv_proj.weight"] += 1
    comparison = compare_weights(weights.items(), some)
    found = (comparison.differing, comparison.num_compared, comparison.num_readable)
    assert found == ((), 2, len(TENSORS)), "that none is known says nothing of what the engine has"
    some["layers.0.k_proj.weight"] = PUBLISHED["layers.0.k_proj.weight"]
    assert compare_weights(weights.items(), some).differing == ("layers.0.k_proj.weight",)


def test_the_engines_own_mapping_of_names_is_followed():
    def name_of(name: str) -> str | None:
        return None if name.startswith("embed.") else f"language_model.{name}"

    weights = {f"language_model.{name}": tensor for name, tensor in held().items()}
    assert compare_weights(weights.items(), PUBLISHED).num_compared == 0
    assert compare_weights(weights.items(), PUBLISHED, name_of).num_compared == len(TENSORS) - 1
    weights["language_model.layers.0.qkv_proj.weight"][4] += 1
    assert compare_weights(weights.items(), PUBLISHED, name_of).differing == ("layers.0.k_proj.weight",)
