"""A stream in one kernel is each sequence's attention, on every context-parallel rank. A wrong kernel is not
used."""

import pytest
import torch
import torch.nn.functional as F

from tests.integration.trainer.varlen_kernel import fails, varlen_attn
from yatt.forecast.memory import activations
from yatt.trainer.attention import varlen

LENGTHS = (16, 16, 8, 48)
CPU = torch.device("cpu")


@pytest.fixture
def kernel(monkeypatch):
    """A slow kernel that runs here."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    return monkeypatch


def chunks_of(rank, cp_size):
    """Index of each token of the whole stream that this rank has."""
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    held = []
    for start, length in zip(starts, LENGTHS, strict=True):
        each = torch.arange(start, start + length).chunk(2 * cp_size)
        held += [each[rank], each[2 * cp_size - 1 - rank]]
    return torch.cat(held)


def one_by_one(query, key, value, window):
    """Causal attention of each sequence of the whole stream, to the last `window` positions if not 0."""
    split = zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True)
    found = []
    for each in split:
        heads = (x.transpose(0, 1)[None] for x in each)
        length = len(each[0])
        sees = [[0 <= row - at < (window or length) for at in range(length)] for row in range(length)]
        attended = F.scaled_dot_product_attention(
            *heads, attn_mask=torch.tensor(sees), scale=0.3, enable_gqa=True
        )
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize(("value_size", "window"), [(8, 0), (4, 0), (8, 5), (8, 1)])
def test_ranks_together_have_the_attention_and_the_gradients_of_the_whole_stream(
    kernel, cp_size, value_size, window
):
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    query, key, value = (
        torch.randn(total, heads, size, generator=generator, requires_grad=True)
        for heads, size in ((4, 8), (2, 8), (2, value_size))
    )
    held = [chunks_of(rank, cp_size) if cp_size > 1 else torch.arange(total) for rank in range(cp_size)]
    in_order = torch.cat(held)  # as the ranks' keys are gathered
    parts = []
    for rank, mine in enumerate(held):
        lengths = [length // cp_size for length in LENGTHS]
        bounds = varlen.varlen_bounds(lengths, cp_size, rank, CPU)
        keys, values = key[in_order], value[in_order]
        if bounds.source_K is not None:
            keys, values = keys[bounds.source_K], values[bounds.source_K]
        parts.append(varlen.varlen_attention(query[mine], keys, values, bounds, 0.3, window))
    got = torch.empty_like(torch.cat(parts)).index_copy(0, in_order, torch.cat(parts))
    expected = one_by_one(query, key, value, window)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=generator)
    gradients = [torch.autograd.grad(each, [query, key, value], weights) for each in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_keys_are_little_more_than_the_whole_sequence():
    bounds = varlen.varlen_bounds([length // 4 for length in LENGTHS], 4, 1, CPU)
    assert len(bounds.source_K) == sum(LENGTHS) * 9 / 8


def without_gradient(*args, **kwargs):
    return varlen_attn(*args, **kwargs).detach()


def upper_left(query, key, value, queries, keys, *rest, **kwargs):
    """Causal from the first key on, as SDPA is where keys are more than queries."""
    starts = keys[:-1].tolist()
    lengths = queries.diff().tolist()
    kept = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    return varlen_attn(query, key[kept], value[kept], queries, queries, rest[0], rest[0], **kwargs)


def without_window(*args, window_size, **kwargs):
    return varlen_attn(*args, window_size=(-1, 0), **kwargs)


def window_too_long(*args, window_size, **kwargs):
    """As if the window did not count the token itself."""
    last = window_size[0]
    return varlen_attn(*args, window_size=(last + (last >= 0), 0), **kwargs)


def narrow_only(query, *args, **kwargs):
    """As a device that has no kernel for wide heads."""
    return (varlen_attn if query.shape[-1] <= 64 else fails)(query, *args, **kwargs)


KERNELS = {"right": (varlen_attn, True), "fails": (fails, False), "upper-left": (upper_left, False),
           "without-gradient": (without_gradient, False), "narrow-only": (narrow_only, False)}  # fmt: skip


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_that_fails_or_is_wrong_is_not_used(kind, kernel):
    function, is_right = KERNELS[kind]
    kernel.setattr(varlen, "varlen_attn", function)
    assert varlen.varlen_is_right(CPU, 128) is is_right
    assert varlen.varlen_is_right(CPU, 128, varlen.SMALL_WINDOW) is is_right


@pytest.mark.parametrize("function", [without_window, window_too_long])
def test_a_kernel_with_a_wrong_window_is_used_without_windows_only(function, kernel):
    kernel.setattr(varlen, "varlen_attn", function)
    assert varlen.varlen_is_right(CPU, 64)
    assert not varlen.varlen_is_right(CPU, 64, varlen.SMALL_WINDOW)


def of_torch_2_11(
    query, key, value, queries, keys, max_q, max_k, *, return_aux=None, scale=None, window_size
):
    """As the function of torch 2.11: without `enable_gqa`, and takes grouped heads by itself."""
    is_grouped = query.shape[1] != key.shape[1]
    settings = {"scale": scale, "window_size": window_size, "enable_gqa": is_grouped}
    return varlen_attn(query, key, value, queries, keys, max_q, max_k, **settings)


@pytest.mark.parametrize("function", [of_torch_2_11, varlen_attn])
def test_grouped_heads_are_switched_on_only_where_the_kernel_has_the_switch(function, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
    assert varlen.varlen_is_right(CPU, 64)


def test_without_a_kernel_nothing_suits():
    assert not varlen.suits_varlen(torch.ones(4, 2, 8), torch.ones(4, 2, 8))
    assert not varlen.suits_varlen(torch.ones(4, 2, 8, dtype=torch.bfloat16), torch.ones(4, 2, 8))


def test_plans_count_with_the_same_widest_head():
    """`yatt.forecast.memory` cannot import torch."""
    assert activations.MOST_HEAD_SIZE == varlen.MOST_HEAD_SIZE
