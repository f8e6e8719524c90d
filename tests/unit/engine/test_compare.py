"""Naming the worst weights."""

import pytest

from yatt.engine.compare import compare_norms

PUBLISHED = {
    "model.layers.0.self_attn.q_proj.weight": 3.0,
    "model.layers.0.self_attn.k_proj.weight": 4.0,
    "model.layers.0.self_attn.v_proj.weight": 12.0,
    "model.layers.0.mlp.down_proj.weight": 2.0,
    "model.norm.weight": 1.0,
    "lm_head.weight": 5.0,
}


def test_equal_norms_have_nothing_to_name():
    held = {"model.layers.0.self_attn.qkv_proj.weight": 13.0, "model.norm.weight": 1.0, "extra": 9.0}
    comparison = compare_norms(held, PUBLISHED)
    assert (comparison.worst, comparison.num_compared) == ((), 4)


def test_the_worst_comes_first():
    held = {
        "model.layers.0.self_attn.qkv_proj.weight": 14.0,
        "model.layers.0.mlp.down_proj.weight": 1.0,
        "model.norm.weight": 1.0005,
        "lm_head.weight": 0.0,
    }
    assert compare_norms(held, PUBLISHED).worst == (
        "lm_head.weight: norm 0 in the engine, 5 published",
        "model.layers.0.mlp.down_proj.weight: norm 1 in the engine, 2 published",
        "model.layers.0.self_attn.qkv_proj.weight: norm 14 in the engine, 13 published",
    )


@pytest.mark.parametrize("held", [{}, {"something": 1.0}])
def test_what_cannot_be_compared_is_not_named(held):
    assert compare_norms(held, PUBLISHED).num_compared == 0
