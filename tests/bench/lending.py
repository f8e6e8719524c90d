"""What could be saved at most if trainer nodes lent their slabs to rollout while they wait for a batch, in
disaggregated placement with `rollout.ahead: 1`.

The most favourable assumptions: what the batch will take is known, the best split for it is used, running
completions spread over the lent engines without cost, and slabs are given back in no time. It is compared
with the best number of trainer nodes, and with partial placement, where nothing has to be lent.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tests.bench.split_policy import JUDGE, ROLES, work
from yatt.core.gpus.placement import ROLLOUT
from yatt.forecast.time.groups import Carried, SimulatedGroups
from yatt.forecast.time.sampling import SimulatedBatch, SimulatedSetting

NUM_SLABS, SWITCH_S, NUM_BATCHES = 8, 15.0, 2
WORK = ((128, 32, 1.0), (128, 128, 1.0), (512, 128, 1.0), (128, 128, 0.5))
"""Prompt groups of a batch, room of a rollout engine, share of groups that are kept."""

TRAIN_SHARES = (0.15, 0.4)
"""Seconds of training on all slabs, as a share of the sampling on all slabs."""

TRAINERS = (1, 2, 3, 4)
"""Slabs of trainer nodes that are tried; with nodes of two slabs, only the even ones."""


class LendingBatch(SimulatedBatch):
    """A batch in which rollout gets more slabs at one moment, over which its completions spread anew."""

    num_lent = 0

    def lend(self, num: int, second: float) -> None:
        self.num_lent = num
        self._at(second, f"begin lent {ROLLOUT}")

    def _begin(self, name: str, role: str) -> None:
        if name != "lent":
            super()._begin(name, role)
            return
        names = [slab for slab, each in self._slabs.items() if each.role == ROLLOUT]
        for engine in [engine for slab in names for engine in self._slabs[slab].engines]:
            self._take(engine)
            self._retire(engine)
            self._dispatch.leave(engine)
        for slab in (*names, *(f"lent{index}" for index in range(self.num_lent))):
            super()._begin(slab, ROLLOUT)


@dataclass(frozen=True)
class Case:
    """Seconds of iterations of one workload, by number of trainer slabs; in partial placement."""

    partial_s: float
    alone_s: dict[int, float]
    lending_s: dict[int, float]

    def best(self, counts: Iterable[int]) -> tuple[float, float]:
        """The best without and with lending."""
        counts = list(counts)
        alone_s = min(self.partial_s, *(self.alone_s[num] for num in counts))
        return alone_s, min(alone_s, *(self.lending_s[num] for num in counts))

    def saved(self, counts: Iterable[int]) -> float:
        alone_s, lending_s = self.best(counts)
        return 1 - lending_s / alone_s

    @property
    def too_many(self) -> int:
        """One trainer slab more than would be best."""
        return min(min(self.alone_s, key=lambda num: self.alone_s[num]) + 1, max(TRAINERS))


def sampled_s(
    num_groups: int, room: int, kept: float, slabs: int, lent: tuple[int, float] = (0, 0.0)
) -> float:
    """Seconds of sampling with the best split; `lent`: more slabs, and from which second on."""
    roles = {**ROLES, ROLLOUT: replace(ROLES[ROLLOUT], room=room)}
    setting, what = (
        SimulatedSetting(roles=roles, switch_s=SWITCH_S),
        replace(work(kept), num_groups=num_groups),
    )

    def seconds(num_judges: int, number: int) -> float:
        groups = SimulatedGroups(what, number, 0, Carried())
        batch = LendingBatch(setting, {ROLLOUT: slabs - num_judges, JUDGE: num_judges}, groups.judged)
        if lent[0]:
            batch.lend(*lent)
        return batch.run(groups.first()).seconds

    tried = range(max(slabs // 5, 1), slabs * 2 // 3 + 1)
    return min(statistics.mean(seconds(num, each) for each in range(NUM_BATCHES)) for num in tried)


def cases(num_groups: int, room: int, kept: float) -> dict[float, Case]:
    """One workload, by share of training."""
    whole_s, found = sampled_s(num_groups, room, kept, NUM_SLABS), {}
    alone_s = {num: sampled_s(num_groups, room, kept, NUM_SLABS - num) for num in TRAINERS}
    for share in TRAIN_SHARES:
        train_s = {num: share * whole_s * NUM_SLABS / num for num in TRAINERS}
        lending_s = dict(alone_s)
        for num, seconds in train_s.items():
            if alone_s[num] > seconds + 2 * SWITCH_S:
                lent = num, seconds + SWITCH_S
                lending_s[num] = min(alone_s[num], sampled_s(num_groups, room, kept, NUM_SLABS - num, lent))
        found[share] = Case(
            whole_s * (1 + share) + 2 * SWITCH_S,
            {num: max(seconds, train_s[num]) for num, seconds in alone_s.items()},
            {num: max(seconds, train_s[num]) for num, seconds in lending_s.items()},
        )
    return found


def run() -> dict[str, Any]:
    """Simulates each workload."""
    rows = []
    for num_groups, room, kept in WORK:
        for share, case in cases(num_groups, room, kept).items():
            best, wrong = min(TRAINERS, key=lambda num: case.alone_s[num]), case.too_many
            rows.append([
                f"{num_groups}", f"{room}", "none" if kept == 1 else f"{1 - kept:.0%}", f"{share:.0%}",
                f"{case.partial_s:.0f} s", f"{case.alone_s[best]:.0f} s ({best})",
                f"{min(case.lending_s.values()):.0f} s", f"{case.saved(TRAINERS):.1%}",
                f"{case.saved(num for num in TRAINERS if num % 2 == 0):.1%}",
                f"{1 - case.lending_s[wrong] / case.alone_s[wrong]:.1%}",
            ])  # fmt: skip
    return {
        "title": "Trainer nodes that lend their slabs, simulated",
        "how": f"`rollout.ahead: 1`, {NUM_SLABS} slabs of 8 GPUs, engines and lengths of `split_policy`, "
        f"switch {SWITCH_S:g} s, the best split for each setting, {NUM_BATCHES} batches. Lent slabs come "
        "when training is over; what the batch takes is known before, running completions spread over them "
        "without cost, and they are back in no time: what is saved is an upper bound. Partial: all nodes do "
        "both in turn, with two switches. Training: its seconds by those of sampling, both on all nodes.",
        "head": ["groups", "room", "groups dropped", "training", "partial", "ahead (trainer slabs)",
                 "with lending", "saved against the best without", "the same, nodes of 2 slabs",
                 "saved with one trainer slab too many"],
        "rows": rows,
        "targets": [],
    }  # fmt: skip
