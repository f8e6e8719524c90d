"""How many slabs rollout and each GenRM have in the next batch: the policy's decision between batches. Pure.

The split whose predicted time for a batch is least (`yatt.core.prediction`). It changes only if that gains
more than a dead band, because lengths differ from batch to batch. The decision within a batch is in
`yatt.core.tail`.

A *unit* is one engine's worth; a slab holds `engines` of them, which differs between roles.
"""

import itertools
from collections.abc import Mapping, Sequence

from yatt.core.prediction import BatchDemand, predict
from yatt.core.tail import RoleSpeed, Split

DEAD_BAND = 0.02
"""Fraction of the predicted time that another split must gain."""

UNDO_BAND, UNDO_BATCHES = 0.1, 3
"""The same for a split that takes back a change of so many batches before: lengths differ by chance."""


def choose(
    before: Sequence[Split],
    demand: BatchDemand,
    roles: Mapping[str, RoleSpeed],
    rollout: str,
    switch_s: float,
) -> dict[str, int]:
    """Returns the split for the next batch: the last one, or a better one by more than the dead band.

    Args:
        before: splits of the batches before, oldest first; at least the last one.
    """
    now, known = before[-1], dict[tuple[tuple[str, int], ...], float]()

    def seconds(split: Split) -> float:
        key = tuple(sorted(split.items()))
        if key not in known:
            known[key] = predict(split, demand, roles, rollout, switch_s)
        return known[key]

    now_s = best_s = seconds(now)
    best, step = dict(now), max(sum(now.values()) // 4, 1)
    while step:
        tried = [(seconds(each), sorted(each.items())) for each in _near(best, step, roles)]
        least_s, split = min(tried, default=(best_s, []))
        if least_s < best_s:
            best_s, best = least_s, dict(split)
        else:
            step //= 2
    band = UNDO_BAND if _undoes(best, before[-UNDO_BATCHES - 1 :]) else DEAD_BAND
    return best if best_s < now_s * (1 - band) else dict(now)


def _undoes(split: Split, before: Sequence[Split]) -> bool:
    """Whether a split takes back, for any role, some of a change among these splits."""
    changes = [*itertools.pairwise(before)]
    return any(
        (new[role] - old[role]) * (split[role] - before[-1][role]) < 0
        for old, new in changes
        for role in split
    )


def _near(split: Split, step: int, roles: Mapping[str, RoleSpeed]) -> list[dict[str, int]]:
    """Splits with `step` slabs moved from one role to another, from all others to one, or from one to all.

    The last two, because two GenRMs that have just enough must give together: if one alone does, the batch
    waits for it.
    """
    found = []
    for one in split:
        others = [role for role in split if role != one]
        for given in (*((role,) for role in others), tuple(others)):
            for change in (step, -step):
                moved = {role: split[role] - change for role in given}
                near = {**split, **moved, one: split[one] + change * len(given)}
                if all(roles[role].least <= num <= roles[role].most for role, num in near.items()):
                    found.append(near)
    return found
