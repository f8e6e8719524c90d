"""Flat ranges of tensor-parallel shards as boxes: together they are the global tensor, each element once."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from yatt.models.rows import LayerNames, decoder_table, layer_rows
from yatt.models.shape import DenseFeedForward, GroupedAttention, Layer, Shape
from yatt.weights.boxes import blocks_of, boxes_of
from yatt.weights.convert import cut_shard


def table(vocab_size, ffn_size):
    """Every kind of row, with the dimension that tensor parallelism cuts."""
    attention = GroupedAttention(num_heads=4, num_kv_heads=4, head_dim=6, has_qkv_bias=True, has_qk_norm=True)
    layer = Layer(attention=attention, feed_forward=DenseFeedForward(size=ffn_size))
    shape = Shape(
        vocab_size=vocab_size, hidden_size=16, layers=(layer,), norm_eps=1e-6, rope_theta=1e4,
        max_positions=64,
    )  # fmt: skip
    fused = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    rows = [*decoder_table(shape, layer_rows(shape)), *layer_rows(shape, fused)]
    return [(row, dim_of(row)) for row in rows]


def dim_of(row):
    if row.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return 1
    return None if "norm" in row.name else 0


@settings(max_examples=150, deadline=None)
@given(
    size=st.sampled_from([1, 2, 4]),
    vocab_size=st.integers(5, 40),
    ffn_size=st.sampled_from([4, 8, 20]),
    seed=st.integers(0, 1 << 30),
)
def test_boxes_of_any_flat_cut_of_any_tensor_cut_make_the_whole(size, vocab_size, ffn_size, seed):
    draw = random.Random(seed)
    for row, dim in table(vocab_size, ffn_size):
        whole = torch.arange(1.0, torch.Size(row.full_shape).numel() + 1).view(row.full_shape)
        made, count = torch.zeros_like(whole), torch.zeros_like(whole)
        ranks = range(1) if dim is None else range(size)
        for rank in ranks:
            flat = cut_shard(row, whole, dim, rank=rank, size=size).reshape(-1)
            cuts = sorted(draw.randrange(len(flat) + 1) for _ in range(draw.randrange(6)))
            blocks = blocks_of(row, dim, rank=rank, size=size)
            for begin, end in itertools.pairwise([0, *cuts, len(flat)]):
                boxes = list(boxes_of(blocks, begin, end))
                assert len(boxes) <= 3 * len(blocks)
                for box in boxes:
                    window = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                    numel = torch.Size(box.shape).numel()
                    assert begin <= box.start
                    assert box.start + numel <= end
                    made[window] = flat[box.start :][:numel].view(box.shape)
                    count[window] += 1
        assert torch.equal(made, whole), row.name
        assert torch.equal(count, torch.ones_like(count)), row.name


@pytest.mark.parametrize(("begin", "end", "expected"), [
    (0, 12, [(0, (3, 4), (0, 4))]),
    (2, 11, [(2, (1, 2), (0, 6)), (4, (1, 4), (1, 4)), (8, (1, 3), (2, 4))]),
    (5, 7, [(5, (1, 2), (1, 5))]),
    (4, 4, []),
])  # fmt: skip
def test_a_flat_range_is_a_rows_end_whole_rows_and_a_rows_beginning(begin, end, expected):
    row = next(row for row, dim in table(9, 4) if dim == 1)
    (block,) = blocks_of(row, 1, rank=1, size=6)
    assert block.shape == (16, 4)
    boxes = [(box.start, box.shape, box.offset) for box in boxes_of([block], begin, end)]
    assert boxes == expected
