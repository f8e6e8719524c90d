"""Products by oneDNN against float64, in every arrangement of memory in which layers ask for them."""

import pytest
import torch

from yatt.trainer.mcore import cpu_matmul


def operands(num_rows, inner, num_columns):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(num_rows, inner, generator=generator)
    return left, torch.randn(inner, num_columns, generator=generator)


def transposed(matrix):
    """The same matrix, stored by columns."""
    return matrix.t().contiguous().t()


def largest_error(got, left, right):
    expected = left.double() @ right.double()
    assert got.shape == expected.shape
    return (got.double() - expected).abs().max().item() / expected.abs().max().item()


@pytest.mark.parametrize("sizes", [(64, 64, 64), (200, 96, 435), (130, 768, 65)])
@pytest.mark.parametrize("left_stored", [torch.clone, transposed])
@pytest.mark.parametrize("right_stored", [torch.clone, transposed])
def test_a_product_is_right_however_its_factors_are_stored(sizes, left_stored, right_stored):
    left, right = operands(*sizes)
    got = cpu_matmul.fast_matmul(left_stored(left), right_stored(right))
    assert largest_error(got, left, right) < 2e-6
    assert got.is_contiguous()


def test_leading_dimensions_stay():
    left, right = operands(6 * 32, 80, 70)
    got = cpu_matmul.fast_matmul(left.view(32, 6, 80), right)
    assert got.shape == (32, 6, 70)
    assert largest_error(got.view(-1, 70), left, right) < 2e-6


def test_batches_side_by_side_in_memory_are_told_apart():
    left, right = operands(6 * 32, 80, 70)
    got = cpu_matmul.fast_matmul(left.view(6, 32, 80).transpose(0, 1), right)
    assert torch.allclose(got, (left @ right).view(6, 32, 70).transpose(0, 1), atol=1e-4)


@pytest.mark.parametrize("sizes", [(63, 80, 80), (0, 80, 80), (80, 1, 80), (80, 80, 3)])
def test_small_products_are_torchs_bit_for_bit(sizes):
    left, right = operands(*sizes)
    assert torch.equal(cpu_matmul.fast_matmul(left, right), left @ right)


def test_other_kinds_are_torchs():
    left, right = operands(80, 80, 80)
    halves = left.bfloat16(), right.bfloat16()
    assert torch.equal(cpu_matmul.fast_matmul(*halves), halves[0] @ halves[1])
    vector = left[0]
    assert torch.equal(cpu_matmul.fast_matmul(vector, right), vector @ right)


def test_the_same_product_twice_is_the_same_bit_for_bit():
    left, right = operands(200, 96, 435)
    assert torch.equal(cpu_matmul.fast_matmul(left, right), cpu_matmul.fast_matmul(left, right))
