"""What limits the speed of a run, from its metrics: sampling, scoring, training, switching or saving. Pure.

If sampling and training take turns, the part that takes most of an iteration limits it. If they overlap
(`rollout.ahead`), sampling is the limit if training waits for samples; if it hardly does, training is,
however long the sampling takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUM_ROWS = 5
"""Number of iterations that are looked at."""

WAITS = 0.1
"""Fraction of an iteration for which training waits, above which sampling limits an overlapped run."""

WAIT = "timing_s/wait_for_samples"
"""Metric that only runs have whose sampling and training overlap."""

LEAST_S, MOST_S = 1e-6, 1e9
"""Seconds that a row may have; others are damaged."""

SAMPLING, TRAINING = "sampling", "training"
_PARTS = {
    SAMPLING: ("rollout",),
    "scoring": ("score",),
    TRAINING: ("train",),
    "switching": ("switch", "weight_update"),
    "saving": ("saving",),
    "validation": ("validation",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What limits a run.

    Attributes:
        by: one of the parts.
        shares: each part's fraction of the time of the newest iterations.
        is_overlapped: whether sampling and training overlap; then the share of sampling is training's wait.
    """

    by: str
    shares: Mapping[str, float]
    is_overlapped: bool

    def in_words(self) -> str:
        """Returns one line for people."""
        if self.is_overlapped:
            waits = f"{self.shares[SAMPLING]:.0%}"
            if self.by == SAMPLING:
                return f"{self.by}: training waits {waits} of an iteration for samples"
            return f"{self.by}: {self.shares[self.by]:.0%} of an iteration; {waits} is a wait for samples"
        others = sorted(
            (name for name in self.shares if name != self.by), key=lambda name: -self.shares[name]
        )
        named = ", ".join(
            f"{name} {self.shares[name]:.0%}" for name in others[:2] if self.shares[name] >= 0.01
        )
        return f"{self.by}: {self.shares[self.by]:.0%} of an iteration" + (f" ({named})" if named else "")


def limit_of(rows: Sequence[Mapping[str, Any]]) -> Limit | None:
    """Returns what limited the newest iterations; None if rows do not say.

    Args:
        rows: of metrics, oldest first. The first iteration is left out if there are others, because it waits
            for things that happen once.
    """
    trained = [row for row in rows if row.get("training/global_step")]
    newest = (trained[1:] or trained)[-NUM_ROWS:]
    seconds = {
        part: sum(_amount(row, f"goodput/{name}_s") for row in newest for name in names)
        for part, names in _PARTS.items()
    }
    total_s = sum(_amount(row, "timing_s/step") for row in newest)
    if total_s < LEAST_S or not any(seconds.values()):
        return None
    is_overlapped = any(WAIT in row for row in newest)
    if is_overlapped:
        seconds[SAMPLING] = sum(_amount(row, WAIT) for row in newest)
    shares = {part: min(1.0, spent_s / total_s) for part, spent_s in seconds.items()}
    by = max(shares, key=lambda part: shares[part])
    if is_overlapped:
        rest = {part: share for part, share in shares.items() if part != SAMPLING}
        by = SAMPLING if shares[SAMPLING] >= WAITS else max(rest, key=lambda part: rest[part])
    return Limit(by=by, shares=shares, is_overlapped=is_overlapped)


def _amount(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value <= MOST_S else 0.0
