"""The kernel for grouped products gives each group's product and gradients, also with an empty group."""

import pytest

pytestmark = pytest.mark.gpu


def test_a_grouped_product_on_the_gpu_is_each_groups_product(cuda):
    import torch

    from yatt.trainer.mcore.grouped_product import grouped_product

    torch.manual_seed(0)
    sizes = [300, 0, 1, 211, 0]
    make = {"device": "cuda", "dtype": torch.bfloat16}
    rows = torch.randn(512, 64, **make).requires_grad_()
    matrices = [torch.randn(128, 64, **make).requires_grad_() for _ in sizes]
    ends = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)
    weights = torch.randn(512, 128, **make)
    one_by_one = [part @ matrix.t() for part, matrix in zip(rows.split(sizes), matrices, strict=True)]
    results = [
        [product, *torch.autograd.grad(product, [rows, *matrices], weights)]
        for product in (grouped_product(rows, ends, matrices), torch.cat(one_by_one))
    ]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
