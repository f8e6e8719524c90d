"""Scores of a group's completions from comparisons between them. Pure.

Win rates and Bradley-Terry strengths are both in [0, 1], and 0.5 is the middle. Bradley and Terry, "Rank
analysis of incomplete block designs" (1952); the iteration is the minorisation of Hunter, "MM algorithms for
generalized Bradley-Terry models" (2004), eq. 3, with one more opponent as prior.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Pairs = Literal["all", "circular", "anchor", "ground_truth", "matchings"]
Orders = Literal["both", "drawn", "one"]
ScoresBy = Literal["win_rate", "bradley_terry"]
PRIOR = 1.0
"""Comparisons of each completion with an opponent of strength 1, half of them won: without them, one that won
every comparison would have infinite strength."""

MOST_ROUNDS, TOLERANCE = 1000, 1e-12


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """One comparison. `outcome` is the share that `first` won: 1, 0, or between (ties, several votes)."""

    first: int
    second: int
    outcome: float


def pairs_of(kind: Pairs, size: int, seed: int = 0, matchings: int = 1) -> list[tuple[int, int]]:
    """Which of `size` completions are compared; number `size` is the ground truth.

    Args:
        seed: draws the completion that is the anchor, and matchings.
        matchings: how often each completion is compared; of an odd number, one is left out each time.
    """
    match kind:
        case "all":
            return list(itertools.combinations(range(size), 2))
        case "circular":
            return [(0, 1)] if size == 2 else [(i, (i + 1) % size) for i in range(size) if size > 1]
        case "anchor":
            anchor = random.Random(f"anchor/{seed}").randrange(size)
            return [(i, anchor) for i in range(size) if i != anchor]
        case "ground_truth":
            return [(i, size) for i in range(size)]
        case "matchings":
            return _matchings(matchings, size, random.Random(f"matchings/{seed}"))


def _matchings(count: int, size: int, draw: random.Random) -> list[tuple[int, int]]:
    """Disjoint perfect matchings, so that no pair comes twice: rounds of the circle method for tournaments
    (one stands still, the others go round), on places that are drawn. There are size - 1 of them, of an odd
    number size."""
    places = [*range(size)] + [None] * (size % 2)
    draw.shuffle(places)
    half, found = len(places) // 2, []
    for _ in range(min(count, len(places) - 1)):
        pairs = zip(places[:half], places[: -half - 1 : -1], strict=True)
        found += [(one, other) for one, other in pairs if one is not None and other is not None]
        places = [places[0], places[-1], *places[1:-1]]
    return found


def lists_of(list_size: int, size: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Which of `size` completions are shown together: all; or, if they are more than `list_size`, which is 0
    or at least 2, overlapping lists of so many. Each list shares its first completion with the list before
    it, and the last one is filled up with those of the first, so that all are in one order. Places are drawn.
    """
    if not list_size or size <= list_size:
        return [tuple(range(size))]
    places = [*range(size)]
    random.Random(f"lists/{seed}").shuffle(places)
    starts = range(0, size, list_size - 1)
    return [tuple(places[(start + i) % size] for i in range(list_size)) for start in starts]


def in_orders(orders: Orders, shown: Sequence[tuple[int, ...]], seed: int = 0) -> list[tuple[int, ...]]:
    """In which orders completions are shown: each as listed (`one`), and turned round beside it (`both`); or
    one of the two, drawn (`drawn`)."""
    if orders == "both":
        return [each for order in shown for each in (order, order[::-1])]
    if orders == "one":
        return list(shown)
    draw = random.Random(f"orders/{seed}")
    return [order[::-1] if draw.random() < 0.5 else order for order in shown]


def comparisons_of(ranking: Sequence[int]) -> list[PairOutcome]:
    """All comparisons that a ranking, the best first, implies."""
    return [PairOutcome(better, worse, 1.0) for better, worse in itertools.combinations(ranking, 2)]


def scores_of(by: ScoresBy, comparisons: Sequence[PairOutcome], size: int) -> list[float]:
    """Scores of completions 0 to `size` - 1; 0.5 for one that was not compared."""
    return (win_rates if by == "win_rate" else bradley_terry)(comparisons, size)


def win_rates(comparisons: Sequence[PairOutcome], size: int) -> list[float]:
    """The mean outcome of each completion's comparisons."""
    won, count = [0.0] * (size + 1), [0] * (size + 1)
    for each in comparisons:
        won[each.first] += each.outcome
        won[each.second] += 1 - each.outcome
        count[each.first] += 1
        count[each.second] += 1
    return [won[i] / count[i] if count[i] else 0.5 for i in range(size)]


def bradley_terry(comparisons: Sequence[PairOutcome], size: int) -> list[float]:
    """Each completion's chance to win against an opponent of strength 1, at the most probable strengths.

    The log-posterior is sum over comparisons of o ln p(i beats j) + (1 - o) ln p(j beats i), with
    p(i beats j) = s_i / (s_i + s_j), and `PRIOR` comparisons of each with strength 1, half of them won.
    """
    won = [PRIOR / 2] * (size + 1)
    for each in comparisons:
        won[each.first] += each.outcome
        won[each.second] += 1 - each.outcome
    strengths = [1.0] * (size + 1)
    for _ in range(MOST_ROUNDS):
        rates = [PRIOR / (s + 1) for s in strengths]
        for each in comparisons:
            rate = 1 / (strengths[each.first] + strengths[each.second])
            rates[each.first] += rate
            rates[each.second] += rate
        before, strengths = strengths, [w / rate for w, rate in zip(won, rates, strict=True)]
        if all(abs(s - b) <= TOLERANCE * b for s, b in zip(strengths, before, strict=True)):
            break
    return [s / (s + 1) for s in strengths[:size]]
