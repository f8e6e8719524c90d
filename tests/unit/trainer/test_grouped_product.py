"""Grouped products and their gradients are those of each group, also of an empty one."""

import pytest
import torch

from yatt.trainer.mcore.grouped_product import grouped_product, product_is_right, stacked_matrices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_view", [False, True])
def test_a_grouped_product_is_each_groups_product(dtype, is_view):
    generator = torch.Generator().manual_seed(0)
    sizes, ends = [3, 0, 9, 4], torch.tensor([3, 3, 12, 16], dtype=torch.int32)
    rows = torch.randn(16, 8, generator=generator).to(dtype).requires_grad_()
    flat = torch.randn(4 * 96, generator=generator).to(dtype)
    views = [flat[96 * i : 96 * i + 64].view(8, 8) for i in range(4)]
    matrices = [(view if is_view else view.clone()).requires_grad_() for view in views]
    assert (stacked_matrices(matrices).data_ptr() == flat.data_ptr()) is is_view
    weights = torch.randn(16, 8, generator=generator).to(dtype)
    results = []
    for product in (
        grouped_product(rows, ends, matrices),
        torch.cat([part @ matrix.t() for part, matrix in zip(rows.split(sizes), matrices, strict=True)]),
    ):
        gradients = torch.autograd.grad(product, [rows, *matrices], weights)
        results.append([product, *gradients])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-6)


def fails(*_args, **_kwargs):
    raise RuntimeError("no kernel")


PRODUCT = torch._grouped_mm
KERNELS = {
    "right": (PRODUCT, True),
    "fails": (fails, False),
    "wrong": (lambda *args, **kwargs: PRODUCT(*args, **kwargs) * 1.5, False),
    "not-a-number": (lambda *args, **kwargs: PRODUCT(*args, **kwargs) * float("nan"), False),
}


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_that_fails_or_is_wrong_is_not_used(kind, monkeypatch):
    kernel, is_right = KERNELS[kind]
    monkeypatch.setattr(torch, "_grouped_mm", kernel)
    product_is_right.cache_clear()
    try:
        assert product_is_right(torch.device("cpu")) is is_right
    finally:
        product_is_right.cache_clear()


def test_a_pass_without_gradients_may_be_the_first_to_ask():
    product_is_right.cache_clear()
    with torch.no_grad():
        assert product_is_right(torch.device("cpu"))
