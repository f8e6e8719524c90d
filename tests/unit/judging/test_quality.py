"""Judges with one known fault each are told apart by the figures, and figures are those by hand."""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from yatt.judging.bootstrap import Figure, figures_with_intervals, mean_measure, order_figure
from yatt.judging.quality import (
    AskedOnce,
    LabelledPair,
    LabelledText,
    answer_figures,
    pair_figures,
    pair_reliability,
    text_figures,
    text_reliability,
)

PROMPTS, PAIRS = 150, 3
FAULTS = ("honest", "guesses", "likes the first", "likes length", "too sure")


def share(logit: float) -> float:
    return 1 / (1 + math.exp(-max(-50.0, min(50.0, logit))))


def pairs_judged_by(fault: str) -> list[LabelledPair]:
    """Verdicts with probabilities. What is better hangs on the quality, with the chance that an honest judge
    says; the sure one's logits are four times as large."""
    draw, found = random.Random(3), []
    for prompt in range(PROMPTS):
        for _ in range(PAIRS):
            sizes, logit = (draw.randrange(50, 400), draw.randrange(50, 400)), draw.gauss(0, 3.0)
            if draw.random() > share(logit):  # the other one is preferred
                logit, sizes = -logit, sizes[::-1]
            if fault == "guesses":
                logit = draw.gauss(0, 3.0)
            liked = 2.0 * math.tanh((sizes[0] - sizes[1]) / 100) if fault == "likes length" else 0.0
            first = 1.5 if fault == "likes the first" else 0.0
            sharp = 4.0 if fault == "too sure" else 1.0
            noise = [0.0] * 4 if fault != "guesses" else [draw.gauss(0, 3.0) for _ in range(4)]
            by_place = (first, -first, first, -first)
            said = [share(sharp * (logit + liked + a + b)) for a, b in zip(by_place, noise, strict=True)]
            found.append(
                LabelledPair(prompt=prompt, lengths=sizes, said=tuple(said[:2]), again=tuple(said[2:]))
            )
    return found


def apart(one: Figure, other: Figure) -> bool:
    return bounds(one)[1] < bounds(other)[0] or bounds(other)[1] < bounds(one)[0]


def bounds(figure: Figure) -> tuple[float, float]:
    assert figure.low is not None and figure.high is not None
    return figure.low, figure.high


def test_judges_with_one_fault_each_are_told_apart_by_their_columns() -> None:
    found = {fault: pair_figures(pairs_judged_by(fault)) for fault in FAULTS}
    honest = found["honest"]
    for fault, column in (
        ("guesses", "agreement"), ("guesses", "consistency"), ("likes the first", "place"),
        ("likes length", "length"), ("too sure", "too_sure"),
    ):  # fmt: skip
        assert all(
            apart(found[fault][column], found[each][column])
            for each in FAULTS
            if each not in (fault, "guesses") and (fault, each) != ("too sure", "likes length")
        ), (fault, column)
    for column in ("place", "length", "too_sure"):
        low, high = bounds(honest[column])
        assert low <= 0 <= high, column
    assert honest["consistency"].value == 1.0 and honest["flips"].value == 0.0
    assert not apart(found["likes the first"]["agreement"], honest["agreement"]), "it alone does not tell"
    assert bounds(found["likes the first"]["flips"])[0] > 0.05


def test_an_interval_is_as_wide_as_that_of_means_of_prompts() -> None:
    """By the error of a mean of independent prompts; items of one prompt are drawn together."""
    draw = random.Random(0)
    means = [draw.gauss(0, 1) for _ in range(200)]
    items = [(prompt, means[prompt]) for prompt in range(200) for _ in range(5)]
    found = figures_with_intervals({"mean": mean_measure(items)})["mean"]
    error = statistics.stdev(means) / math.sqrt(200)
    assert found.items == 1000 and found.value == pytest.approx(statistics.fmean(means))
    low, high = bounds(found)
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.15)
    assert figures_with_intervals({"mean": mean_measure(items)}) == {"mean": found}, "draws are seeded"


@pytest.mark.parametrize(("prompts", "has_interval"), [(19, False), (20, True)])
def test_few_prompts_have_no_interval(prompts: int, has_interval: bool) -> None:
    items = [(number % prompts, float(number % 2)) for number in range(400)]
    found = figures_with_intervals({"mean": mean_measure(items), "other": mean_measure(items[:19])})
    order = order_figure([(prompt, float(place % 7), value) for place, (prompt, value) in enumerate(items)])
    assert order is not None
    assert (found["mean"].low is not None) == (order.low is not None) == has_interval
    assert found["mean"].items == 400 and found["other"].low is None, "of all prompts only 19 have one"


@pytest.mark.parametrize("longer", [0.2, 0.5, 0.8])
def test_a_judge_that_is_blind_to_length_has_none_whatever_labels_prefer(longer: float) -> None:
    draw = random.Random(2)
    items = [
        LabelledPair(
            prompt=number % 60,
            lengths=(9, 1) if draw.random() < longer else (1, 9),
            said=(float(draw.random() > 0.3),),
        )
        for number in range(4000)
    ]
    assert pair_figures(items)["length"].value == pytest.approx(0, abs=0.03)
    said = [LabelledPair(prompt=e.prompt, lengths=e.lengths, said=(float(e.lengths[0] > 5),)) for e in items]
    assert pair_figures(said)["length"].value == 0.5, "the longer one always wins"


def pair(*said: float | None, lengths: tuple[int, int] = (1, 2), **more: object) -> LabelledPair:
    return LabelledPair(prompt=0, lengths=lengths, said=said, **more)  # type: ignore[arg-type]


def test_figures_of_pairs_are_those_by_hand() -> None:
    items = [
        pair(1.0, 1.0, lengths=(9, 1), again=(1.0, 1.0)),  # right
        pair(1.0, 0.0, again=(0.0, 0.0)),  # the first place wins: a tie, that becomes a loss
        pair(0.0, 0.0, lengths=(1, 9), again=(0.0, 0.0)),  # wrong: the longer one
        pair(1.0, None),  # unreadable in one order
    ]
    found = pair_figures(items)
    values = {name: each.value for name, each in found.items()}
    assert values == {
        "agreement": pytest.approx(1.5 / 3), "consistency": pytest.approx(2 / 3),
        "place": pytest.approx(1 / 3), "flips": pytest.approx(1 / 3),
        "length": pytest.approx((0.0 + (0.5 + 1.0) / 2) / 2), "brier": pytest.approx((0 + 0.25 + 1) / 3),
    }  # fmt: skip
    assert found["agreement"].items == 3 and found["agreement"].low is found["agreement"].high is None


def test_a_judge_that_is_shown_no_pairs_has_neither_place_nor_flips() -> None:
    found = pair_figures([pair(1.0, again=(1.0,)), pair(0.5, again=(0.0,))])
    assert found.keys() == {"agreement", "consistency", "brier"}, "no preferred one is longer"
    assert found["agreement"].value == 0.75 and found["consistency"].value == 0.5


def text(label: float, said: float | None, again: float | None = None, length: int = 1) -> LabelledText:
    return LabelledText(prompt=length, label=label, length=length, said=said, again=again)


def test_figures_of_completions_are_those_by_hand() -> None:
    items = [
        text(1, 0.9, 0.6, 3), text(1, 0.5, 0.4, 8), text(0, 0.2, 0.2, 5), text(0, 0.7, 0.2, 4), text(0, None)
    ]  # fmt: skip
    found = {name: each.value for name, each in text_figures(items, (0.0, 1.0)).items()}
    assert found["agreement"] == pytest.approx((1 + 0.5 + 1 + 0) / 4), "a middle is half of both"
    assert found["auc"] == pytest.approx(3 / 4), "of four pairs with different labels, 0.5 is below 0.7"
    assert found["consistency"] == pytest.approx(3 / 4)
    assert found["brier"] == pytest.approx((0.01 + 0.25 + 0.04 + 0.49) / 4)
    assert found["too_sure"] == pytest.approx((0.9 + 0.5 + 0.8 + 0.7) / 4 - 2.5 / 4)


def test_the_order_of_numbers_is_counted_as_all_pairs_by_hand() -> None:
    draw = random.Random(5)
    items = [(draw.randrange(30), draw.randrange(6) / 5, float(draw.randrange(4))) for _ in range(120)]
    pairs = [(a[1] - b[1]) * (a[2] - b[2]) for i, a in enumerate(items) for b in items[:i] if a[2] != b[2]]
    by_hand = sum(1.0 if each > 0 else 0.5 if each == 0 else 0.0 for each in pairs) / len(pairs)
    found = order_figure(items)
    assert found is not None and found.value == pytest.approx(by_hand)
    assert bounds(found)[0] < by_hand < bounds(found)[1]
    assert order_figure([(0, 1.0, 1.0), (1, 0.0, 1.0)]) is None, "no two labels differ"


def partial_by_residuals(items: list[LabelledText]) -> float:
    labels = [each.label for each in items]

    def left(values: list[float]) -> list[float]:
        slope, intercept = statistics.linear_regression(labels, values)
        return [value - slope * label - intercept for value, label in zip(values, labels, strict=True)]

    scores = left([each.said or 0.0 for each in items])
    return statistics.correlation(scores, left([float(each.length) for each in items]))


def test_length_is_the_correlation_that_the_label_leaves() -> None:
    draw, items = random.Random(1), []
    for prompt in range(200):
        label = float(draw.random() < 0.5)
        length = int(100 + 100 * label + draw.gauss(0, 30))  # better ones are longer
        said = label + (0.004 * (length - 100 - 100 * label) if prompt % 2 else draw.gauss(0, 0.1))
        items.append(LabelledText(prompt=prompt, label=label, length=length, said=said))
    assert text_figures(items)["length"].value == pytest.approx(partial_by_residuals(items))
    honest = [
        LabelledText(prompt=i, label=e.label, length=e.length, said=e.label) for i, e in enumerate(items)
    ]
    found = text_figures(honest, (0.0, 1.0))
    assert found["length"].value == 0.0 and found["agreement"].value == found["auc"].value == 1.0
    assert "too_sure" not in found, "words have no confidence"


@pytest.mark.parametrize(("factor", "more"), [(1e9, 1e9), (1e-3, 1e6), (1e140, 0.0), (1.0, 1e12)])
def test_large_scores_and_labels_leave_the_same_correlation(factor: float, more: float) -> None:
    draw, items = random.Random(1), []
    for number in range(60):
        label = float(draw.randrange(3))
        length, said = int(100 + 50 * label + draw.gauss(0, 30)), label + draw.gauss(0, 1)
        items.append(LabelledText(prompt=number, label=label, length=length, said=said))
    large = [replace(e, said=factor * (e.said or 0.0) + more, label=e.label * 4e8) for e in items]
    assert text_figures(large)["length"].value == pytest.approx(text_figures(items)["length"].value, abs=1e-3)
    same = [replace(e, said=more + 0.1) for e in items]
    assert text_figures(same)["length"].value == 0.0


def test_a_reliability_table_shows_who_is_too_sure() -> None:
    honest, sure = (pair_reliability(pairs_judged_by(fault)) for fault in ("honest", "too sure"))
    assert sum(each.items for each in honest) == PROMPTS * PAIRS
    assert all(abs(each.confidence - each.agreement) < 0.15 for each in honest if each.items > 40)
    assert any(each.confidence - each.agreement > 0.08 for each in sure if each.items > 40)
    items = [text(1, 0.95), text(0, 0.95), text(0, 0.1), text(1, None)]
    (found,) = text_reliability(items, (0.0, 1.0))
    assert (found.items, found.agreement) == (3, pytest.approx(2 / 3))
    assert text_reliability([text(2, 3.0)], (1.0, 2.0, 3.0)) == []


def test_answers_are_counted_by_how_they_end() -> None:
    asked = [
        AskedOnce(
            prompt=0, is_readable=True, is_cut=False, num_tokens=4, confidence=0.8, is_thought_cut=True
        ),
        AskedOnce(prompt=0, is_readable=False, is_cut=True, num_tokens=8, is_thought_cut=False),
        AskedOnce(prompt=1, is_readable=True, is_cut=False, num_tokens=6, confidence=0.6),
        AskedOnce(prompt=2, is_readable=False, is_cut=False),
    ]
    found = {name: each.value for name, each in answer_figures(asked).items()}
    assert found == {
        "unreadable": 0.5, "cut": 0.25, "thought_cut": 0.5, "confidence": pytest.approx(0.7), "tokens": 9.0,
    }  # fmt: skip
    assert answer_figures([]) == {}


@pytest.mark.parametrize("figures", [pair_figures, lambda items: text_figures(items, (0.0, 1.0))])
def test_no_verdict_at_all_is_no_figure(figures: Callable[[list[object]], dict[str, Figure]]) -> None:
    assert figures([]) == {}
    assert figures([pair(None, None)] if figures is pair_figures else [text(1, None)]) == {}
