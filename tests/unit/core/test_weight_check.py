"""How far an engine's log-probs may be from the trainer's."""

import math

import pytest

from yatt.core.gpus.weight_check import LEAST_ALLOWED, ROUNDINGS_ALLOWED, allowed_difference, row_differences
from yatt.records.message import pack_floats


def packed(*logprobs: list[float]) -> tuple[bytes, ...]:
    return tuple(pack_floats(row) for row in logprobs)


def test_the_mean_is_over_the_tokens_of_each_row_so_that_none_hides_another() -> None:
    found = row_differences(packed([-1.0, -2.0], [-3.0]), packed([-1.5, -2.0], [-4.0]))
    assert found == pytest.approx([0.25, 1.0])
    assert row_differences((), ()) == []


@pytest.mark.parametrize(
    "got", [[[-1.0]], [[-1.0, -2.0, -3.0]], [[-1.0, math.nan]], [[-1.0, -math.inf]], [[-1.0], [-2.0]], []]
)
def test_what_cannot_be_compared_is_infinitely_far(got: list[list[float]]) -> None:
    assert row_differences(packed([-1.0, -2.0]), packed(*got)) == [math.inf]


@pytest.mark.parametrize("dtype", LEAST_ALLOWED)
def test_what_is_allowed_follows_the_measured_rounding_unless_configured(dtype: str) -> None:
    assert allowed_difference(dtype, 0.0, 0.0) == LEAST_ALLOWED[dtype]
    assert allowed_difference(dtype, 0.0, 0.2) == pytest.approx(ROUNDINGS_ALLOWED * 0.2)
    assert allowed_difference(dtype, 0.05, 0.2) == 0.05
