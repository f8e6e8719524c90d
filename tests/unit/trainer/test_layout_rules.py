"""Layouts that cannot be are the user's mistake, said before anything is built."""

import pytest

from yatt.config.schema import TrainerSection
from yatt.errors import ConfigError
from yatt.trainer.layout import check_layout
from yatt.weights.shape import ModelShape

SHAPE = ModelShape(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=32,
    ffn_size=66,
    num_layers=6,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling_factor=0.0,
    is_tied=False,
    has_qkv_bias=False,
    has_qk_norm=True,
    max_positions=64,
    init_std=0.02,
)


def layout(**sizes):
    steps = {"total_iterations": 1, "train_batch_size": 1, "mini_batch_size": 1}
    names = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "ep": "expert"}
    return TrainerSection(**steps, **{f"{names[k]}_model_parallel_size": v for k, v in sizes.items()})


@pytest.mark.parametrize(
    ("sizes", "world_size", "says"),
    [
        ({"tp": 2}, 3, "3 ranks are no multiple of TP 2 x PP 1 x CP 1"),
        ({"tp": 4}, 4, "tensor_model_parallel_size 4 does not divide 6 heads"),
        ({"tp": 3}, 3, "tensor_model_parallel_size 3 does not divide 2 key/value heads"),
        ({"pp": 4}, 4, "6 layers do not divide into PP 4 x VPP 1"),
        ({"vpp": 2}, 1, "needs pipeline_model_parallel_size above 1"),
        ({"ep": 2}, 2, "the model is dense"),
    ],
)
def test_what_does_not_fit_is_named(sizes, world_size, says):
    with pytest.raises(ConfigError, match=says):
        check_layout(SHAPE, layout(**sizes), world_size)


def test_what_fits_passes():
    check_layout(SHAPE, layout(tp=2, pp=3), 12)
