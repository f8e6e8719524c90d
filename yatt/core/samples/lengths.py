"""Counts of completions by length: are long ones trained on as often as they are sampled? Pure.

A bucket holds the lengths above half of its upper limit; limits are powers of two.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Fate = Literal["accepted", "dropped", "cut"]
"""accepted: complete, of a group to train on. dropped: complete, of a group that is not. cut: interrupted,
and continued in the next iteration; such a completion is counted again when its group is complete."""

FATES: tuple[Fate, ...] = ("accepted", "dropped", "cut")
_PREFIX = "rollout/length_to_"


def key_of(num_tokens: int, fate: Fate) -> str:
    """Returns the name of the metric that counts completions of this length, in tokens."""
    return f"{_PREFIX}{1 << max(0, num_tokens - 1).bit_length()}/{fate}"


def by_bucket(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, int]]:
    """Sums rows of metrics: the number of completions by upper limit of the bucket, then by fate."""
    found: dict[int, dict[str, int]] = {}
    for row in rows:
        for key, value in row.items():
            limit, _, fate = key.removeprefix(_PREFIX).partition("/")
            is_count = key.startswith(_PREFIX) and limit.isdecimal() and fate in FATES
            if is_count and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(int(limit), dict.fromkeys(FATES, 0))[fate] += int(value)
    return dict(sorted(found.items()))
