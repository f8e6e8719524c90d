"""Intervals of figures by the bootstrap over prompts. Pure.

Prompts are drawn, not items, since what is said about one prompt is not independent: percentiles of draws,
after Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), 13.3. Figures are functions of sums
over items, so a draw is a weighted sum; only orders have to be counted anew.
"""

import bisect
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

import msgspec

TIMES, SEED, MARGIN = 400, 0, 0.025
"""Draws, their seed, and what is cut off at both ends."""

FEWEST_PROMPTS = 20
"""Of fewer prompts there is no interval: percentiles of their draws are too narrow, or of width 0."""

SAME, ROUNDING = 1e-9, 1e-14
"""Numbers that differ by less are equal; parts of the largest one that are errors of rounding."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and its 95 % interval. `items`: of how many it is made; `low`, `high`: None: it is of fewer
    than `FEWEST_PROMPTS` prompts."""

    value: float
    low: float | None
    high: float | None
    items: int


Sums = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SummedFigure:
    """A figure that is made of sums: of each item its prompt and what it adds, and the figure of the sums,
    None if there is none."""

    terms: Sequence[tuple[int, Sums]]
    figure: Callable[[Sequence[float]], float | None]


def ratio_of_sums(sums: Sequence[float]) -> float | None:
    """The first sum, divided by the second one."""
    return sums[0] / sums[1] if sums[1] else None


def mean_of_ratios(sums: Sequence[float]) -> float | None:
    """The mean of the first sum divided by the second one, and the third by the fourth; None if there is
    not each of them."""
    one, other = ratio_of_sums(sums[:2]), ratio_of_sums(sums[2:])
    return None if one is None or other is None else (one + other) / 2


def scaled_values(values: Sequence[float]) -> list[float]:
    """Returns values less their mean, divided by the largest distance from it: squares of large ones would
    lose all digits, or be infinite. Zeros where they do not differ."""
    most = max(map(abs, values), default=0.0) or 1.0
    parts = [value / most for value in values]
    mean = math.fsum(parts) / len(parts) if parts else 0.0
    far = [part - mean for part in parts]
    span = max(map(abs, far), default=0.0)
    return [each / span for each in far] if span * most > SAME and span > ROUNDING else [0.0] * len(far)


def mean_measure(terms: Sequence[tuple[int, float]]) -> SummedFigure:
    """The mean of values, each with its prompt."""
    return SummedFigure([(prompt, (float(value), 1.0)) for prompt, value in terms], ratio_of_sums)


@dataclass(frozen=True, slots=True)
class _Draws:
    """How often each prompt is in each draw."""

    prompts: dict[int, int]  # place of each
    counts: list[list[int]] = field(default_factory=list)

    @classmethod
    def of_prompts(cls, prompts: Sequence[int]) -> "_Draws":
        places = {prompt: place for place, prompt in enumerate(sorted(set(prompts)))}
        chance, size = random.Random(SEED), len(places)
        counts = []
        for _ in range(TIMES if size >= FEWEST_PROMPTS else 0):
            drawn = [0] * size
            for place in chance.choices(range(size), k=size):
                drawn[place] += 1
            counts.append(drawn)
        return cls(places, counts)


def figures_with_intervals(measures: Mapping[str, SummedFigure]) -> dict[str, Figure]:
    """Returns the figures that can be made, with their intervals."""
    prompts = [prompt for each in measures.values() for prompt, _ in each.terms]
    draws = _Draws.of_prompts(prompts)
    made = {name: _with_interval(each, draws) for name, each in measures.items() if each.terms}
    return {name: each for name, each in made.items() if each is not None}


def _with_interval(measure: SummedFigure, draws: _Draws) -> Figure | None:
    columns = [[0.0] * len(draws.prompts) for _ in measure.terms[0][1]]
    for prompt, sums in measure.terms:
        for column, term in zip(columns, sums, strict=True):
            column[draws.prompts[prompt]] += term
    value = measure.figure([math.fsum(column) for column in columns])
    found = [measure.figure([sum(map(mul, drawn, column)) for column in columns]) for drawn in draws.counts]
    is_enough = len({prompt for prompt, _ in measure.terms}) >= FEWEST_PROMPTS
    return _interval(value, found if is_enough else [], len(measure.terms))


def _interval(value: float | None, found: Sequence[float | None], items: int) -> Figure | None:
    """Returns the figure; without draws the interval is not known."""
    if value is None:
        return None
    known = sorted(each for each in found if each is not None)
    if not known:
        return Figure(value=value, low=None, high=None, items=items)
    low, high = known[int(MARGIN * len(known))], known[math.ceil((1 - MARGIN) * len(known)) - 1]
    return Figure(value=value, low=low, high=high, items=items)


def order_figure(items: Sequence[tuple[int, float, float]]) -> Figure | None:
    """The concordance of scores with labels.

    Args:
        items: prompt, score and label of each.
    """
    draws = _Draws.of_prompts([prompt for prompt, *_ in items])
    labels = sorted({label for *_, label in items})
    ordered = sorted((score, bisect.bisect_left(labels, label), prompt) for prompt, score, label in items)
    equal = [list(each) for _, each in itertools.groupby(ordered, key=lambda item: round(item[0], 9))]
    ties = [[(rank, draws.prompts[prompt]) for _, rank, prompt in each] for each in equal]
    once = [1] * len(draws.prompts)
    found = [_concordance(ties, counts, len(labels)) for counts in draws.counts]
    return _interval(_concordance(ties, once, len(labels)), found, len(items))


def _concordance(
    ties: Sequence[Sequence[tuple[int, int]]], counts: Sequence[int], num_labels: int
) -> float | None:
    """Returns the share of pairs of items with different labels that scores have in the labels' order; equal
    scores are half.

    Args:
        ties: items of equal score, from the least: the rank of the label, and the place of the prompt.
        counts: how often each prompt counts.
    """
    below = _Counts(num_labels)  # labels of items with lower scores
    right = total = 0.0
    for tie in ties:
        own: dict[int, int] = {}
        for rank, place in tie:
            if counts[place]:
                own[rank] = own.get(rank, 0) + counts[place]
        for rank, count in own.items():
            lower, upto = below.before(rank), below.before(rank + 1)
            right += count * lower
            total += count * (lower + below.total - upto)
        size = sum(own.values())
        mixed = (size**2 - sum(count**2 for count in own.values())) / 2
        right, total = right + mixed / 2, total + mixed
        for rank, count in own.items():
            below.add(rank, count)
    return right / total if total else None


class _Counts:
    """Counts by rank, and their sums before a rank (a tree of partial sums: Fenwick 1994)."""

    def __init__(self, size: int) -> None:
        self._sums, self.total = [0] * (size + 1), 0

    def add(self, rank: int, count: int) -> None:
        self.total += count
        place = rank + 1
        while place < len(self._sums):
            self._sums[place] += count
            place += place & -place

    def before(self, rank: int) -> int:
        found = 0
        while rank > 0:
            found += self._sums[rank]
            rank -= rank & -rank
        return found
