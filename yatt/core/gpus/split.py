"""How many slabs rollout and each GenRM have in the next batch: the policy's decision between batches. Pure.

The split whose predicted time for a batch is least (`yatt.core.gpus.prediction`); that roles take turns with
all slabs (`tail.takes_turns`) is one of them. It changes only if that gains more than a dead band, because
lengths differ from batch to batch. The decision within a batch is in `yatt.core.gpus.tail`.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from yatt.core.gpus.prediction import NEVER_S, USUAL, BatchDemand, Effort, predicted_seconds
from yatt.core.gpus.tail import RoleSpeed, Split, takes_turns

DEAD_BAND = 0.02
"""Fraction of the predicted time that another split must gain."""

MISTRUST = 0.1
"""Share of what moves within a batch are predicted to save that is not believed: of splits that are alike,
the one that needs fewer moves is chosen."""

FINEST = 64
"""Splits are compared down to this part of all slabs, or one slab."""

CAREFUL = Effort(times=4)
"""A change is made only if this prediction agrees."""

UNDO_BAND, UNDO_BATCHES = 0.1, 3
"""The same for a split that takes back a change of so many batches before: lengths differ by chance."""


def believed_s(
    split: Split,
    demand: BatchDemand,
    roles: Mapping[str, RoleSpeed],
    rollout: str,
    switch_s: float,
    *,
    effort: Effort = USUAL,
) -> float:
    """Returns the predicted seconds of a batch, without the share of what moves save that is not believed."""
    moving_s = predicted_seconds(split, demand, roles, rollout, switch_s, effort=effort)
    if moving_s > effort.limit_s or takes_turns(split, rollout):
        return moving_s
    enough_s = moving_s + (effort.limit_s - moving_s) / MISTRUST
    fixed_s = predicted_seconds(
        split, demand, roles, rollout, NEVER_S, effort=replace(effort, limit_s=enough_s)
    )
    seconds = moving_s + MISTRUST * max(fixed_s - moving_s, 0.0)
    return seconds if fixed_s <= enough_s else max(seconds, math.nextafter(effort.limit_s, math.inf))


def choose_split(
    before: Sequence[Split],
    demand: BatchDemand,
    roles: Mapping[str, RoleSpeed],
    rollout: str,
    switch_s: float,
    *,
    may_turn: bool = False,
) -> dict[str, int]:
    """Returns the split for the next batch: the last one, or a better one by more than the dead band.

    Args:
        before: splits of the batches before, oldest first; at least the last one.
        may_turn: whether roles may take turns.
    """
    now = dict(before[-1])
    search = _Search(partial(believed_s, demand=demand, roles=roles, rollout=rollout, switch_s=switch_s))
    total = sum(now.values())
    turns = {**dict.fromkeys(now, 0), rollout: total}
    starts = [each for each in (now, *_by_work(demand, roles, rollout, total)) if each != turns]
    best = search.nearest_best(starts, roles) if starts else turns
    if now == turns and not may_turn:
        return best
    best = search.best_of([best, turns]) if may_turn else best
    band = UNDO_BAND if _undoes(best, before[-UNDO_BATCHES - 1 :]) else DEAD_BAND
    if best == now or search.seconds(best) >= search.seconds(now) * (1 - band):
        return now
    best_s, now_s = (
        believed_s(each, demand, roles, rollout, switch_s, effort=CAREFUL) for each in (best, now)
    )
    return best if best_s < now_s * (1 - band) else now


class _Search:
    """Predicts splits, each only as far as it may be the best one.

    Args:
        believed: `believed_s` for a demand.
    """

    def __init__(self, believed: Callable[..., float]) -> None:
        self._believed = believed
        self._known: dict[tuple[tuple[str, int], ...], tuple[float, float]] = {}
        """Seconds of splits, and the limit up to which they are exact."""

    def seconds(self, split: Split, limit_s: float = math.inf) -> float:
        """Returns the seconds of a split; of one that takes longer than the limit, any number above it."""
        key = tuple(sorted(split.items()))
        found_s, until_s = self._known.get(key, (0.0, -math.inf))
        if not (limit_s <= until_s or found_s <= until_s or found_s > limit_s):
            found_s = self._believed(split, effort=Effort(limit_s=limit_s))
            self._known[key] = found_s, limit_s
        return found_s

    def best_of(self, splits: Sequence[dict[str, int]]) -> dict[str, int]:
        """Returns the fastest split; the first ones should be good ones."""
        best, best_s = splits[0], self.seconds(splits[0])
        for each in splits[1:]:
            each_s = self.seconds(each, best_s)
            if (each_s, sorted(each.items())) < (best_s, sorted(best.items())):
                best, best_s = each, each_s
        return best

    def nearest_best(
        self, starts: Sequence[dict[str, int]], roles: Mapping[str, RoleSpeed]
    ) -> dict[str, int]:
        """Returns a split that is faster than all near it, on the way from the fastest of these."""
        best, total = self.best_of(starts), sum(starts[0].values())
        step = max(total // 8, 1)
        while step >= max(total // FINEST, 1):
            nearest = self.best_of([best, *_near(best, step, roles)])
            if self.seconds(nearest) < self.seconds(best):
                best = nearest
            else:
                step //= 2
        return best


def _by_work(
    demand: BatchDemand, roles: Mapping[str, RoleSpeed], rollout: str, total: int
) -> list[dict[str, int]]:
    """Returns the split in proportion to the work of each role, from where the search begins: on the way from
    the present split, the time need not fall everywhere. Empty if the limits do not allow it."""
    lengths = {rollout: demand.completions, **demand.verdicts}
    work_s = {role: sum(each) / max(len(each), 1) / roles[role].peak for role, each in lengths.items()}
    split = {role: roles[role].least for role in lengths}
    while sum(split.values()) < total:
        able = [role for role in lengths if split[role] < roles[role].most]
        if not able:
            return []
        split[max(able, key=lambda role: (work_s[role] / split[role], role))] += 1
    return [split] if sum(split.values()) == total else []


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
