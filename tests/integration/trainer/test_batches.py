"""Packing: every completion token is predicted from its place, and streams have few lengths where asked."""

from types import ModuleType

import numpy as np
import pytest
import torch

from tests.packages import trainer_module

CPU = torch.device("cpu")


def batches() -> ModuleType:
    return trainer_module("attention.batches")


def sample(num_prompt, num_completion, start):
    ids = np.arange(1000 * start, 1000 * start + num_prompt + num_completion, dtype=np.int64)
    return batches().one_turn(ids[:num_prompt], ids[num_prompt:], start)


def samples(sizes):
    starts = np.cumsum([0, *(size[1] for size in sizes)])
    return [sample(*size, int(start)) for size, start in zip(sizes, starts, strict=False)]


def packed(sizes, cut):
    made = samples(sizes)
    weights = [np.ones(one.num_completion_tokens, np.float32) for one in made]
    return batches().micro_batch(made, weights, cut, CPU)


def hidden_tokens(micro):
    """Tokens as the model lays its hidden states: [S / B, B], flattened."""
    return micro.tokens.t().reshape(-1)


SIZES = {
    "different": [(5, 40), (12, 90), (3, 1), (7, 300)],
    "equal": [(6, 50)] * 3,
    "one": [(4, 150)],
    "none": [],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("has_few_lengths", [False, True])
@pytest.mark.parametrize("align", [1, 2])
def test_each_completion_token_is_read_off_the_place_before_it(sizes, has_few_lengths, align):
    micro = packed(sizes, batches().SequenceLayout(align=align, has_few_lengths=has_few_lengths))
    num_tokens = sum(size[1] for size in sizes)
    assert sorted(micro.flat_T.tolist()) == list(range(num_tokens))
    before = hidden_tokens(micro)[micro.rows_R[: len(micro.labels_T)]]
    assert torch.equal(before + 1, micro.labels_T)  # a sample's ids count up
    assert len(micro.rows_R) >= max(1, num_tokens)
    assert len(micro.rows_R) % align == 0


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_padding_is_no_part_of_a_sequence_and_trains_nothing(sizes):
    plain, filled = (
        packed(sizes, batches().SequenceLayout(align=1, has_few_lengths=few)) for few in (False, True)
    )
    assert torch.equal(plain.labels_T, filled.labels_T)
    assert torch.equal(plain.weights_T, filled.weights_T)
    assert filled.tokens.numel() >= plain.tokens.numel()
    if len(sizes) > 1:
        bucketed = batches().bucketed_length(plain.tokens.numel())
        assert filled.tokens.numel() == bucketed or len(set(sizes)) == 1
    if filled.packed is not None and plain.packed is not None:
        bounds = plain.packed.cu_seqlens_q
        assert torch.equal(filled.packed.cu_seqlens_q[: len(bounds)], bounds)
        assert filled.packed.max_seqlen_q == plain.packed.max_seqlen_q


def test_sequences_of_padding_are_no_longer_than_the_longest():
    micro = packed([(2, 30)] * 40 + [(2, 31)], batches().SequenceLayout(align=1, has_few_lengths=True))
    lengths = micro.packed.cu_seqlens_q.diff()
    assert int(lengths.sum()) == batches().bucketed_length(40 * 31 + 32)
    assert int(lengths.max()) == 32


@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
def test_runs_of_equal_sequences_are_those_of_the_bounds(cp_size, cp_rank):
    cut = batches().SequenceLayout(align=2 * cp_size, cp_size=cp_size, cp_rank=cp_rank)
    micro = packed([(2, 31), (4, 29), (5, 40), (1, 7), (2, 31)], cut)
    lengths = [length * cp_size for length, count in micro.packed.runs for _ in range(count)]
    assert lengths == micro.packed.cu_seqlens_q.diff().tolist()
    assert [count for _, count in micro.packed.runs] == [1, 3, 1]
    assert sum(length * count for length, count in micro.packed.runs) == micro.tokens.numel()


def test_even_lengths_are_few_and_at_most_an_eighth_longer():
    lengths = range(64, 1 << 14)
    assert all(length <= batches().bucketed_length(length) <= length * 9 / 8 for length in lengths)
    assert len({batches().bucketed_length(length) for length in lengths}) == 8 * 8 + 1
    assert [batches().bucketed_length(length) for length in (0, 1, 63, 64, 65)] == [0, 1, 63, 64, 72]
