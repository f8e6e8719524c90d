"""CUDA's kernel for streams is SDPA with masks, with gradients, for the widths of the families' heads."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value_size"),
    [(8, 2, 128, 128), (4, 4, 64, 64), (4, 4, 192, 128), (2, 1, 256, 256)],
)  # fmt: skip
@pytest.mark.parametrize(("cp_size", "window"), [(1, 0), (4, 0), (1, 100), (4, 100)])
def test_a_stream_on_the_gpu_is_each_sequences_attention(
    cuda, heads, kv_heads, size, value_size, cp_size, window
):
    import torch

    from yatt.trainer.attention.varlen import masked_attention, suits_varlen, varlen_attention, varlen_bounds

    torch.manual_seed(0)
    lengths = [64, 64, 8, 520]
    bounds = varlen_bounds(lengths, cp_size, cp_size // 2, cuda)
    num_queries, num_keys = (int(bound[-1]) for bound in (bounds.queries, bounds.keys))
    make = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(num_queries, heads, size, **make).requires_grad_()
    key = torch.randn(num_keys, kv_heads, size, **make).requires_grad_()
    value = torch.randn(num_keys, kv_heads, value_size, **make).requires_grad_()
    assert suits_varlen(query, value, window=window)
    weights = torch.randn(num_queries, heads, value_size, **make)
    results = [
        [attended, *torch.autograd.grad(attended, [query, key, value], weights)]
        for attended in (
            varlen_attention(query, key, value, bounds, size**-0.5, window),
            masked_attention(query, key, value, bounds, size**-0.5, window),
        )
    ]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
