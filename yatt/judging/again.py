"""How a GenRM's second opinion differs from the one that a run was trained by. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from yatt.judging.bootstrap import (
    SAME,
    Figure,
    SummedFigure,
    Sums,
    figures_with_intervals,
    mean_measure,
    scaled_values,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAgain:
    """One completion, and what was said about it then and now.

    Attributes:
        group: number of its prompt group.
        scores: the GenRM's; None: there was none.
        rewards: of all scores; None: its group had none, since a score was missing.
        advantages: None as `rewards`, or where the algorithm's cannot be computed from them.
    """

    group: int
    scores: tuple[float | None, float | None]
    rewards: tuple[float | None, float | None]
    advantages: tuple[float | None, float | None] = (None, None)

    @property
    def is_scored_twice(self) -> bool:
        """Whether there are both scores."""
        return None not in self.scores

    @property
    def has_changed(self) -> bool:
        """Whether the scores differ, or one of them is missing."""
        before, now = self.scores
        return (before is None) != (now is None) or _differ(before, now)

    @property
    def change(self) -> float:
        """How much its advantage has changed, or without advantages its score; 0 if one is missing."""
        for before, now in (self.advantages, self.scores):
            if before is not None and now is not None:
                return now - before
        return 0.0


def again_figures(items: Sequence[AskedAgain], equal_rewards: float) -> dict[str, Figure]:
    """Returns the figures of a second opinion, by name; those that cannot be made are left out.

    changed: share of the scores that differ. kendall: mean rank correlation (tau-b) within groups, of those
    in which neither opinion is one score for all. advantages: correlation of then and now. signs: share of
    the advantages whose sign changes. flat_before and flat_now: share of groups with equal rewards.
    dropped_before and dropped_now: share of groups without rewards.

    Args:
        equal_rewards: differences below it are none.
    """
    groups: dict[int, list[AskedAgain]] = {}
    for each in items:
        groups.setdefault(each.group, []).append(each)
    pairs = [(each.group, *each.advantages) for each in items]
    known = [(group, before, now) for group, before, now in pairs if before is not None and now is not None]
    measures = {
        "changed": mean_measure([(each.group, each.has_changed) for each in items]),
        "kendall": mean_measure(
            [(group, tau) for group, found in groups.items() if (tau := _kendall(found)) is not None]
        ),
        "advantages": SummedFigure(_advantage_terms(known), _correlation),
        "signs": mean_measure([(group, _sign(before) != _sign(now)) for group, before, now in known]),
    }
    for place, when in enumerate(("before", "now")):
        rewards = {group: [each.rewards[place] for each in found] for group, found in groups.items()}
        there = {group: _known(found) for group, found in rewards.items()}
        measures[f"dropped_{when}"] = mean_measure([(group, not found) for group, found in there.items()])
        measures[f"flat_{when}"] = mean_measure(
            [(g, max(found) - min(found) < equal_rewards) for g, found in there.items() if len(found) > 1]
        )
    return figures_with_intervals(measures)


def _known(rewards: Sequence[float | None]) -> list[float]:
    """The rewards of a group; empty if one is missing."""
    found = [each for each in rewards if each is not None]
    return found if len(found) == len(rewards) else []


def _differ(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and abs(before - now) > SAME


def _sign(value: float) -> int:
    return (value > SAME) - (value < -SAME)


def _kendall(found: Sequence[AskedAgain]) -> float | None:
    """Kendall's tau-b (Kendall 1945) of the scores of a group; None if all of one opinion are equal."""
    scores = [(b, n) for b, n in (each.scores for each in found) if b is not None and n is not None]
    both = before = now = 0
    for place, (b, n) in enumerate(scores):
        for other_b, other_n in scores[:place]:
            one, other = _sign(b - other_b), _sign(n - other_n)
            both, before, now = both + one * other, before + abs(one), now + abs(other)
    return both / math.sqrt(before * now) if before and now else None


def _advantage_terms(known: Sequence[tuple[int, float, float]]) -> list[tuple[int, Sums]]:
    before = scaled_values([then for _, then, _ in known])
    now = scaled_values([value for *_, value in known])
    return [(group, _moments(a, b)) for (group, *_), a, b in zip(known, before, now, strict=True)]


def _moments(before: float, now: float) -> Sums:
    return 1.0, before, now, before**2, now**2, before * now


def _correlation(sums: Sequence[float]) -> float | None:
    n, b, w, bb, ww, bw = sums
    if not n:
        return None
    spread = (bb / n - (b / n) ** 2) * (ww / n - (w / n) ** 2)
    return (bw / n - b / n * (w / n)) / math.sqrt(spread) if spread > SAME**2 else None
