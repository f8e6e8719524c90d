"""What comparisons say of the truth, by a simulated judge: which pairs and orders are worth their price."""

import math
import random
import statistics

from yatt.judging.comparison import Orders, PairOutcome, Pairs, in_orders, pairs_of, scores_of

GROUPS, SIZE, SHARPNESS = 150, 8, 1.6


def standardized(values: list[float]) -> list[float]:
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    return [(value - mean) / deviation if deviation else 0.0 for value in values]


def correlation(pairs: Pairs, orders: Orders, place: float, matchings: int = 3) -> float:
    """Of advantages by Bradley-Terry with those of the truth. The judge prefers the first place by `place`
    logits, and the better completion by their difference."""
    draw, judged, true = random.Random(1), list[float](), list[float]()
    for seed in range(GROUPS):
        worth = [draw.gauss(0, 1) for _ in range(SIZE)]
        outcomes = []
        for first, second in in_orders(orders, pairs_of(pairs, SIZE, seed, matchings), seed):
            chance = 1 / (1 + math.exp(-SHARPNESS * (worth[first] - worth[second]) - place))
            outcomes.append(PairOutcome(first, second, float(draw.random() < chance)))
        judged += standardized(scores_of("bradley_terry", outcomes, SIZE))
        true += standardized(worth)
    return statistics.correlation(judged, true)


def test_three_matchings_say_most_of_what_all_pairs_say_for_less_than_half_the_questions() -> None:
    some, every = correlation("matchings", "both", 0.0), correlation("all", "both", 0.0)
    assert 0.77 <= some <= 0.83 and 0.88 <= every <= 0.94


def test_both_orders_pay_only_for_a_judge_that_prefers_a_place() -> None:
    """At the same price: 24 questions about 8 completions."""
    assert correlation("matchings", "drawn", 0.0, 6) > correlation("matchings", "both", 0.0)
    assert correlation("matchings", "drawn", 3.0, 6) < correlation("matchings", "both", 3.0) - 0.05
