"""Layouts that cannot be are the user's mistake, said before anything is built."""

from dataclasses import replace

import pytest

from yatt.config.schema import TrainerSection
from yatt.errors import ConfigError
from yatt.models.shape import DenseFeedForward, Experts, GroupedAttention, Layer, Shape
from yatt.trainer.mcore.layout import check_layout, end_stages

LAYER = Layer(
    attention=GroupedAttention(num_heads=6, num_kv_heads=2, head_dim=8, has_qk_norm=True),
    feed_forward=DenseFeedForward(size=66),
)
SHAPE = Shape(
    vocab_size=64, hidden_size=32, layers=(LAYER,) * 6, norm_eps=1e-6, rope_theta=1e4, max_positions=64
)  # fmt: skip


def layout(**sizes):
    steps = {"total_iterations": 1, "train_batch_size": 1, "mini_batch_size": 1}
    names = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "ep": "expert"}
    etp = {"expert_tensor_parallel_size": sizes.pop("etp", 0)}
    sizes = {f"{names[key]}_model_parallel_size": size for key, size in sizes.items()}
    return TrainerSection(**steps, **etp, **sizes)


@pytest.mark.parametrize(
    ("sizes", "world_size", "says"),
    [
        ({"tp": 2}, 3, "3 ranks are no multiple of TP 2 x PP 1 x CP 1"),
        ({"tp": 4}, 4, "tensor_model_parallel_size 4 does not divide 6 heads"),
        ({"tp": 3}, 3, "tensor_model_parallel_size 3 does not divide 2 key/value heads"),
        ({"pp": 7}, 7, "pipeline_model_parallel_size 7 is more than the model's 6 layers"),
        ({"pp": 2, "vpp": 2}, 2, "6 layers do not divide into PP 2 x VPP 2"),
        ({"vpp": 2}, 1, "needs pipeline_model_parallel_size above 1"),
        ({"ep": 2}, 2, "expert_model_parallel_size 2: the model is dense"),
        ({"etp": 2}, 2, "expert_tensor_parallel_size 2: the model is dense"),
    ],
)
def test_what_does_not_fit_is_named(sizes, world_size, says):
    with pytest.raises(ConfigError, match=says):
        check_layout(SHAPE, layout(**sizes), world_size)


def test_one_layer_is_too_few_for_two_stages():
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size 2 is more than the model's 1 layers"):
        check_layout(replace(SHAPE, layers=(LAYER,)), layout(pp=2), 2)


def test_what_fits_passes():
    check_layout(SHAPE, layout(tp=2, pp=3), 12)


EXPERTS = Experts(num_experts=4, top_k=2, size=20, normalizes=True, shared_size=33)
MIXED = replace(SHAPE, layers=(LAYER, replace(LAYER, feed_forward=EXPERTS)) * 3)


@pytest.mark.parametrize(
    ("shape", "sizes", "says"),
    [
        (
            MIXED,
            {"tp": 2},
            "tensor_model_parallel_size 2 does not divide 33 FFN columns of the shared expert",
        ),
        (MIXED, {"tp": 2}, "sequence_parallel: a model with experts needs it with tensor_model_parallel"),
        (
            replace(SHAPE, layers=(replace(LAYER, feed_forward=replace(EXPERTS, size=21)),)),
            {"tp": 2},
            "does not divide 21 FFN columns of an expert",
        ),
        (
            MIXED,
            {"ep": 3},
            "expert_model_parallel_size 3 does not divide the 4 experts of a layer; write one of 1, 2",
        ),
        (
            MIXED,
            {"ep": 2, "etp": 3},
            "expert_tensor_parallel_size 3 does not divide 20 FFN columns of an expert",
        ),
        (MIXED, {"ep": 4}, "2 ranks are no multiple of expert TP 1 x EP 4 x PP 1"),
        (
            MIXED,
            {"tp": 2, "etp": 1},
            "it can differ from tensor_model_parallel_size 2 only if experts are spread",
        ),
    ],
)
def test_what_does_not_fit_a_model_with_experts_is_named(shape, sizes, says):
    with pytest.raises(ConfigError, match=says):
        check_layout(shape, layout(**sizes), 2)


def test_layers_with_and_without_experts_pass():
    check_layout(MIXED, layout(pp=2), 2)
    check_layout(MIXED, layout(ep=4, pp=2), 8)
    experts = replace(EXPERTS, shared_size=34)
    layers = tuple(
        replace(layer, feed_forward=experts) if layer.feed_forward == EXPERTS else layer
        for layer in MIXED.layers
    )
    check_layout(replace(MIXED, layers=layers), replace(layout(tp=2), sequence_parallel=True), 2)


def test_layers_that_differ_are_refused_by_name():
    other = replace(LAYER, feed_forward=DenseFeedForward(size=LAYER.feed_forward.size * 2))
    with pytest.raises(ConfigError, match="they differ in more than in whether they have experts"):
        check_layout(replace(SHAPE, layers=(*SHAPE.layers[:-1], other)), layout(), 1)


def test_layers_may_have_one_window_but_not_two():
    narrow, narrower = (
        replace(LAYER, attention=replace(LAYER.attention, window=window)) for window in (8, 4)
    )
    check_layout(replace(SHAPE, layers=(LAYER, narrow) * 3), layout(), 1)
    with pytest.raises(ConfigError, match="experts or the one window"):
        check_layout(replace(SHAPE, layers=(LAYER, narrow, narrower) * 2), layout(), 1)


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_layers", range(1, 40))
def test_stages_have_all_layers_and_the_ends_not_more_than_needed(num_layers, num_stages):
    if num_layers < num_stages:
        return
    first, last = end_stages(num_layers, layout(pp=num_stages))
    if first is None:
        assert num_layers % num_stages == 0
        return
    middle, rest = divmod(num_layers - first - last, num_stages - 2) if num_stages > 2 else (first, 0)
    assert rest == 0
    assert min(first, middle, last) >= 1
    assert max(first, middle, last) <= 2 * -(-num_layers // num_stages)
