"""What a model folder must hold is compared with the weight table before anything is started."""

from dataclasses import replace

import pytest

from yatt.models.model import model_of
from yatt.models.rows import Part, matrix_row, vector_row
from yatt.models.tensors import hf_shapes, tensor_faults

VALUES = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 62,
}  # fmt: skip
MODEL = model_of(VALUES | {"tie_word_embeddings": True})
SHAPES = {name: shape for row in MODEL.rows for name, shape in hf_shapes(row).items()}


def faults(shapes: dict[str, tuple[int, ...]], *, is_tied: bool = True) -> list[str]:
    return list(tensor_faults(replace(MODEL, shape=replace(MODEL.shape, is_tied=is_tied)), shapes))


def test_rows_of_one_tensor_are_added_and_each_tensor_has_its_own_shape() -> None:
    fused = matrix_row("w", [Part("qkv", 8), Part("qkv", 4), Part("o", 2)], 16)
    assert hf_shapes(fused) == {"qkv": (12, 16), "o": (2, 16)}
    assert hf_shapes(vector_row("n", "norm", 5)) == {"norm": (5,)}


def test_the_tensors_of_the_table_are_accepted() -> None:
    assert faults(SHAPES) == []


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("model.norm.weight", None, "has no tensor model.norm.weight; its config.json promises them"),
        ("model.norm.weight", (33,), "model.norm.weight with shape (33,); its config.json promises (32,)"),
        ("model.norm.weight", (32, 1), "shape (32, 1); its config.json promises (32,)"),
        ("model.layers.2.mlp.up_proj.weight", (64, 32), "not use: model.layers.2.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.q_proj.bias", (64,), "not use: model.layers.0.self_attn.q_proj.bias"),
        ("lm_head.weight", (62, 32), ""),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (8,), ""),
    ],
)
def test_a_wrong_tensor_is_named(name: str, shape: tuple[int, ...] | None, says: str) -> None:
    changed = {key: value for key, value in SHAPES.items() if key != name} | ({name: shape} if shape else {})
    found = faults(changed)
    assert (len(found), says in "".join(found)) == (1 if says else 0, True), found


def test_an_output_matrix_that_is_not_tied_must_have_a_row() -> None:
    assert "lm_head.weight" in faults(SHAPES | {"lm_head.weight": (62, 32)}, is_tied=False)[0]


def test_many_missing_tensors_are_one_short_sentence() -> None:
    (said,) = faults({"model.norm.weight": (32,)})
    assert said.count(",") == 2 and " more; its config.json" in said
