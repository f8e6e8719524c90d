"""Win rates and Bradley-Terry strengths equal independent references; wrong ones would be caught."""

import math
import random

import pytest
import torch

from yatt.judging.comparison import (
    PRIOR,
    PairOutcome,
    bradley_terry,
    comparisons_of,
    pairs_of,
    scores_of,
    win_rates,
)


def drawn(seed: int, size: int, kind: str) -> list[PairOutcome]:
    chance = random.Random(seed)
    return [
        PairOutcome(i, j, chance.choice([0.0, 0.25, 0.5, 1.0]))
        for i, j in pairs_of(kind, size, seed)
        for _ in range(2)
    ]


def slope_of_the_posterior(comparisons: list[PairOutcome], scores: list[float]) -> torch.Tensor:
    """Gradient of the log-posterior by log-strength, in float64; it is concave, so 0 is its maximum."""
    log_strengths = torch.logit(torch.tensor(scores, dtype=torch.float64)).requires_grad_()
    chance = torch.nn.functional.logsigmoid
    total = PRIOR / 2 * (chance(log_strengths) + chance(-log_strengths)).sum()
    for each in comparisons:
        gap = log_strengths[each.first] - log_strengths[each.second]
        total = total + each.outcome * chance(gap) + (1 - each.outcome) * chance(-gap)
    total.backward()
    return log_strengths.grad


@pytest.mark.parametrize("kind", ["all", "circular", "anchor", "ground_truth"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_bradley_terry_is_the_maximum_of_the_posterior(kind, size):
    comparisons = drawn(size, size, kind)
    if kind == "ground_truth":  # it is a completion more, whose score is not returned
        size += 1
    scores = bradley_terry(comparisons, size)
    assert slope_of_the_posterior(comparisons, scores).abs().max() < 1e-9
    moved = [score + 1e-4 * (-1) ** i for i, score in enumerate(scores)]
    assert slope_of_the_posterior(comparisons, moved).abs().max() > 1e-5


@pytest.mark.parametrize("kind", ["all", "circular", "anchor", "ground_truth"])
def test_win_rates_are_the_means_of_what_was_won(kind):
    comparisons = drawn(7, 5, kind)
    for i, got in enumerate(win_rates(comparisons, 5)):
        won = [c.outcome for c in comparisons if c.first == i] + [
            1 - c.outcome for c in comparisons if c.second == i
        ]
        assert got == pytest.approx(sum(won) / len(won))


def test_strengths_tell_apart_what_win_rates_cannot():
    """1 beat the strong 0, 2 beat the weak 3; each won one of two."""
    comparisons = [
        PairOutcome(0, 3, 1.0), PairOutcome(0, 4, 1.0), PairOutcome(1, 0, 1.0), PairOutcome(1, 4, 0.0),
        PairOutcome(2, 3, 1.0), PairOutcome(2, 0, 0.0), PairOutcome(3, 4, 0.0),
    ]  # fmt: skip
    rates, strengths = win_rates(comparisons, 5), bradley_terry(comparisons, 5)
    assert rates[1] == rates[2] == 0.5
    assert strengths[1] != pytest.approx(strengths[2], abs=1e-3)


@pytest.mark.parametrize("by", ["win_rate", "bradley_terry"])
def test_scores_are_shares_and_ordered_as_a_ranking_says(by):
    ranking = [3, 0, 2, 1]
    scores = scores_of(by, comparisons_of(ranking), 4)
    assert sorted(range(4), key=lambda i: -scores[i]) == ranking
    assert all(0 <= score <= 1 for score in scores)
    assert math.fsum(scores) == pytest.approx(2.0), "the mean is the middle"


@pytest.mark.parametrize("by", ["win_rate", "bradley_terry"])
def test_ties_and_nothing_at_all_are_the_middle(by):
    ties = [PairOutcome(i, j, 0.5) for i, j in pairs_of("all", 4)]
    assert scores_of(by, ties, 4) == pytest.approx([0.5] * 4)
    assert scores_of(by, [], 3) == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("size", range(2, 9))
def test_pairs(size):
    every = pairs_of("all", size)
    assert len(every) == size * (size - 1) // 2 == len({frozenset(pair) for pair in every})
    circle = pairs_of("circular", size)
    assert len({frozenset(pair) for pair in circle}) == len(circle) == (size if size > 2 else 1)
    assert {i for pair in circle for i in pair} == set(range(size))
    anchored = pairs_of("anchor", size, seed=4)
    anchors = {pair[1] for pair in anchored}
    assert len(anchors) == 1 and {i for pair in anchored for i in pair} == set(range(size))
    assert len({pairs_of("anchor", size, seed)[0][1] for seed in range(200)}) == size, "drawn by the seed"
    assert pairs_of("ground_truth", size) == [(i, size) for i in range(size)]
