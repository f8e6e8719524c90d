"""Estimates of an evaluation, against brute force and known formulas."""

import itertools
import math
import statistics

import pytest
from hypothesis import given, strategies as st

from yatt.core.figures.evaluation import Estimate, mean_of, pass_at_k, pass_rate


def brute_force(outcomes: list[bool], k: int) -> float:
    """The share of all subsets of k samples that have one that passes."""
    subsets = list(itertools.combinations(outcomes, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_all_subsets_with_a_sample_that_passes(
    outcomes: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(brute_force(outcomes, k), abs=1e-12)


def test_pass_at_k_of_many_samples_neither_overflows_nor_loses_digits() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    assert pass_at_k(10_000, 10_000, 1) == 1.0
    assert pass_at_k(10_000, 0, 10_000) == 0.0


def test_the_error_with_one_sample_per_prompt_is_that_of_a_mean() -> None:
    values = [0.0, 1.0, 1.0, 0.25, 0.5]
    found = mean_of([[value] for value in values])
    assert found.mean == pytest.approx(statistics.mean(values))
    assert found.std_err == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)))


def test_copies_of_a_sample_add_nothing_to_what_is_known() -> None:
    values = [0.0, 1.0, 1.0, 0.25, 0.5]
    once, eight_times = mean_of([[v] for v in values]), mean_of([[v] * 8 for v in values])
    assert eight_times.mean == pytest.approx(once.mean)
    assert eight_times.std_err == pytest.approx(once.std_err)


def test_prompts_without_scores_and_single_prompts_are_no_zeros() -> None:
    assert mean_of([[], []]) == Estimate(mean=None, std_err=None, prompts=0)
    assert mean_of([[0.5, 0.7], []]) == Estimate(mean=pytest.approx(0.6), std_err=None, prompts=1)


def test_pass_rate_leaves_out_prompts_with_fewer_scores_than_k() -> None:
    scores = [[1.0, 0.0, 0.0, 0.0], [1.0], [0.0, 0.99]]
    assert pass_rate(scores, 1, 1.0).mean == pytest.approx((0.25 + 1.0 + 0.0) / 3)
    assert pass_rate(scores, 2, 1.0) == Estimate(
        mean=pytest.approx((0.5 + 0.0) / 2), std_err=pytest.approx(0.25), prompts=2
    )
    assert pass_rate(scores, 2, 0.5).mean == pytest.approx((0.5 + 1.0) / 2)
