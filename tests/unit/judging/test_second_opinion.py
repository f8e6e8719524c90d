"""Figures of a second opinion are those by hand; no change is none."""

import random
import statistics

import pytest

from yatt.judging.again import AskedAgain, again_figures

EQUAL = 1e-6


def asked(group: int, then: float | None, now: float | None, *advantages: float) -> AskedAgain:
    return AskedAgain(
        group=group, scores=(then, now), rewards=(then, now), advantages=advantages or (None, None)
    )  # type: ignore[arg-type]


def test_the_same_opinion_is_no_change() -> None:
    draw = random.Random(0)
    items = [asked(i // 4, s := float(draw.randrange(3)), s, s - 1, s - 1) for i in range(40)]
    found = {name: each.value for name, each in again_figures(items, EQUAL).items()}
    assert (found["changed"], found["signs"], found["kendall"]) == (0.0, 0.0, 1.0)
    assert found["advantages"] == pytest.approx(1.0)
    assert found["flat_before"] == found["flat_now"] and found["dropped_now"] == 0.0


def test_figures_of_a_second_opinion_are_those_by_hand() -> None:
    items = [
        asked(0, 1.0, 0.0, 1.0, -1.0), asked(0, 0.0, 1.0, -1.0, 1.0),  # turned round
        asked(1, 1.0, 1.0, 0.0, 0.0), asked(1, 1.0, 1.0, 0.0, 0.0),  # flat then and now
        asked(2, 0.5, 0.25, 0.5, 0.5), asked(2, 0.0, 0.0, -0.5, -0.5),  # another number, the same order
        asked(3, 1.0, None), asked(3, 0.0, 0.0),  # dropped now
    ]  # fmt: skip
    found = {name: each.value for name, each in again_figures(items, EQUAL).items()}
    then, now = [1, -1, 0, 0, 0.5, -0.5], [-1, 1, 0, 0, 0.5, -0.5]
    assert found == {
        "changed": pytest.approx(4 / 8), "kendall": pytest.approx((-1 + 1) / 2),
        "advantages": pytest.approx(statistics.correlation(then, now)), "signs": pytest.approx(2 / 6),
        "flat_before": pytest.approx(1 / 4), "flat_now": pytest.approx(1 / 3),
        "dropped_before": 0.0, "dropped_now": pytest.approx(1 / 4),
    }  # fmt: skip
    assert items[0].change == -2.0 and items[6].change == 0.0 and asked(0, 1.0, 0.25).change == -0.75


def test_large_advantages_are_as_correlated_as_small_ones() -> None:
    draw = random.Random(0)
    pairs = [(then := draw.gauss(0, 1), then + draw.gauss(0, 1)) for _ in range(40)]
    small, large = (
        again_figures([asked(i, 1.0, 1.0, a * by + more, b * by) for i, (a, b) in enumerate(pairs)], EQUAL)
        for by, more in ((1.0, 0.0), (1e170, 1e170))
    )
    assert large["advantages"].value == pytest.approx(small["advantages"].value)


def test_kendall_with_ties_is_tau_b() -> None:
    items = [asked(0, then, now) for then, now in ((1, 1), (1, 2), (2, 2), (3, 1))]
    # of six pairs: one tied then, two tied now; concordant 1 (1,1)-(2,2), discordant 2
    found = again_figures(items, EQUAL)["kendall"].value
    both = sum(
        ((a > c) - (a < c)) * ((b > d) - (b < d))
        for i, (a, b) in enumerate(((1, 1), (1, 2), (2, 2), (3, 1)))
        for c, d in ((1, 1), (1, 2), (2, 2), (3, 1))[:i]
    )
    assert found == pytest.approx(both / (5 * 4) ** 0.5)


def test_without_advantages_the_others_are_there() -> None:
    found = again_figures([asked(0, 1.0, 0.0), asked(0, 0.0, 1.0)], EQUAL)
    assert "advantages" not in found and found["changed"].value == 1.0
    assert again_figures([], EQUAL) == {}
