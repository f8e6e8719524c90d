"""Products of groups of rows, each with its own matrix, in one kernel.

`torch._grouped_mm` has a kernel for bfloat16 on Hopper and later GPUs; elsewhere it multiplies one by one.

Suffixes: T rows in the order of their groups, E groups, N and K rows and columns of a matrix.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


def grouped_product(rows_TK: Tensor, ends_E: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Each group of rows times its own matrix, transposed, with gradients.

    Args:
        rows_TK: [T, K], of the matrices' dtype. K and N must be whole multiples of 16 bytes.
        ends_E: int32, the end of each group among the rows; a group may be empty.
        matrices: E of [N, K].

    Returns:
        [T, N].
    """
    product: Tensor = _GroupedProduct.apply(rows_TK, ends_E, *matrices)  # type: ignore[no-untyped-call]
    return product


class _GroupedProduct(torch.autograd.Function):
    """Keeps the separate matrices, so that what was copied together is not kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows_TK: Tensor, ends_E: Tensor, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows_TK, ends_E, *matrices)
        return torch._grouped_mm(rows_TK, stacked_matrices(matrices).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> Any:
        rows_TK, ends_E, *matrices = ctx.saved_tensors
        grad_TN = grad_TN.contiguous()
        grad_rows = torch._grouped_mm(grad_TN, stacked_matrices(matrices), offs=ends_E)
        grad_ENK = torch._grouped_mm(grad_TN.t(), rows_TK, offs=ends_E)
        # It is not documented whether the kernel writes the gradient of an empty group.
        is_empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        grad_ENK.masked_fill_(is_empty_E[:, None, None], 0)
        return grad_rows, None, *grad_ENK.unbind()


@functools.cache
def product_is_right(device: torch.device) -> bool:
    """Whether a small product in bfloat16, with an empty group, has the result and the gradients of a loop.
    Asked once per device: torch's function is not public, and a kernel that fails must not end a run."""
    generator = torch.Generator().manual_seed(0)
    sizes = [24, 0, 40]
    numbers = [torch.randn(shape, generator=generator) for shape in ((64, 32), *[(48, 32)] * 3, (64, 48))]
    rows, *matrices, weights = [each.to(device, torch.bfloat16).requires_grad_() for each in numbers]
    ends = torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32)
    try:
        with torch.enable_grad():  # the first to ask may be a pass without gradients
            parts = zip(torch.split(rows, sizes), matrices, strict=True)
            grouped = grouped_product(rows, ends, matrices)
            loop = torch.cat([part @ matrix.t() for part, matrix in parts])
        got, expected = (
            [each, *torch.autograd.grad(each, [rows, *matrices], weights)] for each in (grouped, loop)
        )
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-1)
    except (RuntimeError, AttributeError, AssertionError) as error:
        _LOG.warning(
            "experts are computed one by one: grouped products are not right on %s: %s", device, error
        )
        return False
    return True


def stacked_matrices(matrices: Sequence[Tensor]) -> Tensor:
    """The matrices as one, [E, N, K]: a view if they are at equal distances in one storage, else a copy."""
    first, second = matrices[0], matrices[1]
    step = second.storage_offset() - first.storage_offset()
    places = {
        (each.untyped_storage().data_ptr(), each.storage_offset() - index * step, each.is_contiguous())
        for index, each in enumerate(matrices)
    }
    if step >= first.numel() and places == {
        (first.untyped_storage().data_ptr(), first.storage_offset(), True)
    }:
        return first.as_strided((len(matrices), *first.shape), (step, *first.stride()))
    return torch.stack(tuple(matrices))
