"""A weight table that cannot be right is refused by name; no module outside asks for a model type."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from yatt.errors import ConfigError
from yatt.models.families import FAMILIES, Family
from yatt.models.model import check_parameter_rows, model_of
from yatt.models.rows import (
    EMBEDDING,
    OUTPUT,
    LayerNames,
    Part,
    WeightRow,
    decoder_table,
    layer_rows,
    vector_row,
)

PACKAGE = Path(__file__).parents[3] / "yatt"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VALUES = {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 62,
          "sliding_window": None, **SIZES}  # fmt: skip
NEEDED = {
    "olmo3": {"sliding_window": 8},
    "minimax_m2": {"rotary_dim": 8, "scoring_func": "sigmoid", "use_routing_bias": True},
}
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
Rows = list[WeightRow]


def changed(rows: Rows, name: str, **values: object) -> Rows:
    assert name in {row.name for row in rows}
    return [replace(row, **values) if row.name == name else row for row in rows]


def without(rows: Rows, name: str) -> Rows:
    return [row for row in rows if row.name != name]


MISTAKES: dict[str, tuple[Callable[[Rows], Rows], str]] = {
    "a parameter twice": (
        lambda rows: [*rows, vector_row(QKV, "other.weight", 8)],
        f"two rows have the parameter {QKV}.",
    ),
    "a tensor twice": (
        lambda rows: changed(rows, OUTPUT, parts=(Part("model.embed_tokens.weight", 62),)),
        "two rows have the tensor model.embed_tokens.weight.",
    ),
    "no embedding": (lambda rows: without(rows, EMBEDDING), f"no row is {EMBEDDING}."),
    "parts that do not divide": (
        lambda rows: changed(rows, QKV, groups=3),
        f"the parts of {QKV} do not divide into 3 groups.",
    ),
    "no group": (lambda rows: changed(rows, QKV, groups=0), f"the parts of {QKV} do not divide into 0"),
    "an empty part": (
        lambda rows: changed(rows, QKV, parts=(Part("other.weight", 0),)),
        f"the parts of {QKV} do not divide",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_table_is_refused_by_name(name: str) -> None:
    wrong, says = MISTAKES[name]
    qwen3 = FAMILIES["qwen3"]
    family = replace(qwen3, model_type="mine", rows=lambda shape: wrong(qwen3.rows(shape)))
    with pytest.raises(ConfigError) as caught:
        model_of({**VALUES, "model_type": "mine"}, family)
    assert f"model.family: mine: {says}" in str(caught.value)


def test_tables_of_the_families_are_right() -> None:
    for kind, family in FAMILIES.items():
        if family.tower is None:  # see test_seeing.py
            values = {**VALUES, "model_type": kind, **NEEDED.get(kind, {})}
            check_parameter_rows(family, model_of(values).rows)


def test_a_family_that_reads_no_shape_is_refused() -> None:
    family = Family(model_type="mine", architecture="Mine", read=lambda _: {})  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="mine: read gives dict, not Shape"):
        model_of({"model_type": "mine"}, family)


def test_a_family_of_the_users_replaces_that_of_the_package() -> None:
    mine = replace(FAMILIES["qwen3"], rows=lambda shape: FAMILIES["qwen3"].rows(shape)[:1])
    assert len(model_of(VALUES, mine).rows) == 1 < len(model_of(VALUES).rows)


def test_one_name_is_a_tensor_of_all_parts_and_more_names_are_a_tensor_each() -> None:
    shape = model_of(VALUES).shape
    fused = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    (row,) = [row for row in decoder_table(shape, layer_rows(shape, fused)) if row.name == QKV]
    assert row.hf_names == ("model.layers.1.self_attn.qkv_proj.weight",)
    assert [part.num_rows for part in row.parts] == [64, 32, 32] and row.groups == 2
    (row,) = [row for row in decoder_table(shape, layer_rows(shape)) if row.name == QKV]
    assert [name.split(".")[-2] for name in row.hf_names] == ["q_proj", "k_proj", "v_proj"]


def test_no_module_but_the_families_names_a_model_type_or_an_architecture() -> None:
    names = {*FAMILIES, *(family.architecture for family in FAMILIES.values())}
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert found == {"models/families.py", "config/sections/sft.py"}, (
        "sft.py: the default of a new model's type"
    )


def test_no_module_outside_compares_a_model_type() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.Match) and "model_type" in ast.unparse(node):
                found.add(str(path.relative_to(PACKAGE)))
    assert found == {"models/model.py", "trainer/sft_main.py"}, "both look it up in the table of families"
