"""The expected best of some completions: compared with every subset, one by one."""

from itertools import combinations
from statistics import mean

import pytest

from yatt.core.samples.best_of import best_of, majority_score, subset_sizes


@pytest.mark.parametrize(
    "scores", [[0.5], [1.0, 0.0], [0.25, -3.0, 0.25, 7.0, 2.0], [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]]
)
def test_best_of_n_is_the_mean_of_the_maximum_over_all_subsets(scores):
    for size in range(1, len(scores) + 1):
        assert best_of(scores, size) == pytest.approx(mean(map(max, combinations(scores, size))))


def test_best_of_n_stays_exact_for_many_completions():
    assert best_of([0.0] * 999 + [1.0], 500) == pytest.approx(0.5)
    assert best_of(list(range(1000)), 1000) == 999
    assert best_of(list(range(1000)), 1) == pytest.approx(499.5)


@pytest.mark.parametrize(
    ("n", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (16, [2, 4, 8, 16])]
)
def test_sizes_are_powers_of_two_and_the_number_of_completions(n, sizes):
    assert subset_sizes(n) == sizes


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        (["a", "b", "b", "c"], 2.0),
        (["a", "b", "b", "a"], 1.0),
        (["", "", "", "c"], 4.0),
        (["", "", "", ""], 0.0),
    ],
)
def test_the_majority_has_the_score_of_its_first_completion(answers, score):
    assert majority_score([1.0, 2.0, 3.0, 4.0], answers) == score
