"""What the trainer could save at most if it got free slabs before a batch ends, in partial placement.

A batch's last slab changes hands after the batch, and training needs every slab. So an early lease saves
only what the others would take longer than the last one. Here each slab that stays free for longer than a
switch is leased as soon as it is free, as if that were known before.
"""

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.bench.split_policy import JUDGE, ROLES, work
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.gpus.split import DEAD_BAND
from yatt.forecast.time.iterations import partial_iterations
from yatt.forecast.time.sampling import IDLE, SimulatedSetting

CELLS = ((1.0, 15.0, 8), (1.0, 30.0, 8), (0.6, 15.0, 8), (1.0, 15.0, 32), (0.6, 15.0, 32))
"""Share of groups that are kept, seconds of a switch, slabs of 8 GPUs."""

GROUPS_PER_SLAB, ITERATIONS, DRAWS = 16, (6, 7), 200
SLEEP_SHARE = 0.4
"""Share of a switch in which the engine falls asleep; in the rest the trainer wakes."""

NODE_SLABS, SLOWER = 4, 0.1
"""Slabs of a node, and by how much one that switches slows each of the others."""

Times = Mapping[str, tuple[float, float]]
"""Seconds until the engines sleep, and until the trainer is awake after that, by slab."""


@dataclass(frozen=True)
class Batch:
    """The end of a simulated batch: its seconds, and the second from which each slab is free."""

    end_s: float
    free_s: Mapping[str, float]
    switch_s: float

    def drawn(self, variation: float, numbers: random.Random) -> Times:
        """Seconds of each slab's switch that differ at random with this standard deviation."""
        sigma = math.sqrt(math.log(1 + variation**2))

        def factor() -> float:
            return numbers.lognormvariate(-(sigma**2) / 2, sigma) if sigma else 1.0

        shares = SLEEP_SHARE * self.switch_s, (1 - SLEEP_SHARE) * self.switch_s
        return {slab: (shares[0] * factor(), shares[1] * factor()) for slab in self.free_s}

    @property
    def free_share(self) -> float:
        """Share of the slabs' time in which the trainer would be awake on them before the end."""
        free_s = sum(self.end_s - self.free_s[slab] - self.switch_s for slab in self.early)
        return free_s / (len(self.free_s) * self.end_s)

    @property
    def early(self) -> set[str]:
        """Slabs that are free for longer than a switch."""
        return {slab for slab, second in self.free_s.items() if self.end_s - second > self.switch_s}

    def saved_s(self, times: Times, slowed: Callable[[Iterable[str], Times], Times]) -> float:
        """Seconds by which training begins earlier."""
        last = set(self.free_s) - self.early
        now_s = _barriers_s(slowed(self.free_s, times))
        ready_s = [self.free_s[slab] + sum(times[slab]) - self.end_s for slab in self.early]
        return now_s - max(_barriers_s(slowed(last, times)), *ready_s, 0.0)


def _barriers_s(times: Times) -> float:
    """All fall asleep before any wakes."""
    return max(t[0] for t in times.values()) + max(t[1] for t in times.values())


def alone(slabs: Iterable[str], times: Times) -> Times:
    return {slab: times[slab] for slab in slabs}


def beside_others(slabs: Iterable[str], times: Times) -> Times:
    """The same if slabs of one node that switch at once slow each other."""
    chosen = set(slabs)
    found = {}
    for slab in chosen:
        num = sum(int(other[1:]) // NODE_SLABS == int(slab[1:]) // NODE_SLABS for other in chosen)
        factor = 1 + SLOWER * (num - 1)
        found[slab] = times[slab][0] * factor, times[slab][1] * factor
    return found


@functools.cache
def batches(kept: float, switch_s: float, num_slabs: int) -> list[Batch]:
    setting = SimulatedSetting(roles=ROLES, switch_s=switch_s, is_dynamic=True)
    what = replace(work(kept), num_groups=GROUPS_PER_SLAB * num_slabs)
    split, found = {ROLLOUT: num_slabs // 2, JUDGE: num_slabs // 2}, []
    for number in ITERATIONS:
        last = partial_iterations(setting, split, what, number + 1, 0, traced=number)[-1]
        (record,) = last.records
        end_s, free_s = last.seconds - last.switch_s, dict[str, float]()
        for slab, changes in record.trace.states.items():
            second, state = changes[-1]
            free_s[slab] = second if state == IDLE else end_s
        found.append(Batch(end_s, free_s, switch_s))
    return found


def saved(cell: tuple[float, float, int], variation: float, *, is_crowded: bool = False) -> float:
    """Share of sampling and switch that an early lease saves."""
    numbers, slowed, shares = random.Random(0), beside_others if is_crowded else alone, []
    for batch in batches(*cell):
        for _ in range(DRAWS if variation else 1):
            saved_s = batch.saved_s(batch.drawn(variation, numbers), slowed)
            shares.append(saved_s / (batch.end_s + batch.switch_s))
    return statistics.mean(shares)


def run() -> dict[str, Any]:
    """Simulates each cell."""
    rows, most = [], 0.0
    for cell in CELLS:
        kept, switch_s, num_slabs = cell
        found = [saved(cell, 0.0), saved(cell, 0.1), saved(cell, 0.2), saved(cell, 0.0, is_crowded=True)]
        most = max(most, *found)
        early = statistics.mean(len(batch.early) for batch in batches(*cell))
        free = statistics.mean(batch.free_share for batch in batches(*cell))
        rows.append([
            f"{num_slabs}", f"{switch_s:g} s", "none" if kept == 1 else f"{1 - kept:.0%}",
            f"{early:g}", f"{free:.1%}", *(f"{share:.1%}" for share in found),
        ])  # fmt: skip
    return {
        "title": "An early lease of the trainer, simulated",
        "how": "Partial placement with the policy of the split, in the setting of `split_policy` with "
        f"{GROUPS_PER_SLAB} groups per slab. Each slab that stays free for longer than a switch is given to "
        "the trainer at once, as if this were known before. Saved: the part of sampling and switch by which "
        "training begins earlier, if switches of slabs are equal, differ at random by 10% or 20%, or are "
        f"equal but {SLOWER:.0%} slower for each other slab of the node ({NODE_SLABS}) that switches at the "
        "same time. Free time: the part of the slabs' time in which the trainer would have them.",
        "head": ["slabs", "switch", "groups dropped", "free slabs", "free time", "saved, equal",
                 "saved, 10%", "saved, 20%", "saved, node shared"],
        "rows": rows,
        "targets": [
            {"what": "most that it saves: less than what a split must gain to change (adr/0054)",
             "target": f"< {DEAD_BAND:.0%}", "value": f"{most:.1%}", "met": most < DEAD_BAND},
        ],
    }  # fmt: skip
