"""The policy of the split in workloads that are drawn, and in those in which an earlier policy was worse than
a fixed split."""

import functools
import itertools
import math
import random
import statistics
from dataclasses import dataclass
from typing import Any

from yatt.core.gpus.batch_loop import BatchSample
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.gpus.prediction import NEVER_S, predicted_seconds
from yatt.core.gpus.tail import RoleSpeed
from yatt.forecast.time.groups import SimulatedGroups, Workload
from yatt.forecast.time.iterations import batch_demand, partial_iterations
from yatt.forecast.time.sampling import SimulatedSetting

JUDGE, CRITIC = "genrm:judge", "genrm:critic"
NUM_DRAWN, NUM_ITERATIONS, FIRST, SEEDS = 14, 12, 4, 2
MOST_FIXED, NEAR = 8, 1.1
"""At most so many fixed splits are simulated, those whose prediction is within this factor of the least."""


@dataclass(frozen=True)
class Drawn:
    """A workload: slabs, speeds by role, and seconds of a switch."""

    name: str
    num_slabs: int
    roles: dict[str, RoleSpeed]
    work: Workload
    switch_s: float

    def splits(self) -> list[dict[str, int]]:
        counts = itertools.product(range(1, self.num_slabs), repeat=len(self.roles))
        return [dict(zip(self.roles, each, strict=True)) for each in counts if sum(each) == self.num_slabs]

    def near_best(self) -> list[dict[str, int]]:
        """Fixed splits with the least predictions."""
        groups = round(self.work.num_groups / self.work.pass_rate)
        whole = Workload(draw=self.work.draw, num_groups=groups, group_size=self.work.group_size)
        demand = batch_demand([SimulatedGroups(whole, 0, 99).first()], self.work, [*self.roles])
        cost_s = [
            (predicted_seconds(each, demand, self.roles, ROLLOUT, NEVER_S), each) for each in self.splits()
        ]
        cost_s.sort(key=lambda each: each[0])
        return [split for seconds, split in cost_s[:MOST_FIXED] if seconds <= NEAR * cost_s[0][0]]

    def seconds(self, split: dict[str, int], *, is_dynamic: bool) -> list[float]:
        setting = SimulatedSetting(roles=self.roles, switch_s=self.switch_s, is_dynamic=is_dynamic)
        return [
            each.seconds
            for seed in range(SEEDS)
            for each in partial_iterations(setting, split, self.work, NUM_ITERATIONS, seed)[FIRST:]
        ]


def sample(
    numbers: random.Random, _: int, *, mean: float, sigma: float, verdicts: dict[str, tuple[float, float]]
) -> BatchSample:
    tokens = min(max(numbers.lognormvariate(math.log(mean) - sigma**2 / 2, sigma), 16.0), 8192)
    return BatchSample(tokens, {role: base + each * tokens for role, (base, each) in verdicts.items()})


def work(
    mean: float, sigma: float, verdicts: dict[str, tuple[float, float]], groups: int, kept: float
) -> Workload:  # fmt: skip
    return Workload(
        draw=functools.partial(sample, mean=mean, sigma=sigma, verdicts=verdicts), num_groups=groups,
        group_size=8, pass_rate=kept,
    )  # fmt: skip


def role(half: float, peak: float, room: int, engines: int) -> RoleSpeed:
    """Engines that make half of `peak` tokens a second with `half` sequences."""
    return RoleSpeed(speed=EngineSpeed(half / peak, 1 / peak), room=room, engines=engines)


def drawn(number: int) -> Drawn:
    draw = random.Random(f"workload {number}")
    num_slabs = round(4 * 8 ** draw.random())
    peak = draw.choice([600, 1200, 2400])
    roles = {
        ROLLOUT: role(draw.choice([8, 16, 48]), peak, draw.choice([32, 128, 256]), draw.choice([1, 2, 4]))
    }
    verdicts = {}
    for judge in (JUDGE, CRITIC)[: draw.choice([1, 2])]:
        roles[judge] = role(
            draw.choice([8, 16, 48]), peak * draw.uniform(0.5, 3), draw.choice([32, 128]), draw.choice([1, 2])
        )
        verdicts[judge] = draw.uniform(50, 1000), draw.choice([0, 0.15, 0.3])
    groups = max(round(num_slabs * draw.choice([4, 8]) * (1 if num_slabs < 16 else 0.5)), 12)
    what = work(
        draw.choice([500, 1500, 4000]), draw.choice([0.5, 0.8, 1.1]), verdicts, groups,
        draw.choice([1.0, 1.0, 0.8, 0.6, 0.4]),
    )  # fmt: skip
    return Drawn(f"drawn {number + 1}", num_slabs, roles, what, draw.uniform(0, 30))


def known() -> list[Drawn]:
    """Where an earlier policy was worse."""
    wide = {ROLLOUT: RoleSpeed(speed=EngineSpeed(0.00333, 0.00021), room=128),
            JUDGE: RoleSpeed(speed=EngineSpeed(0.0091, 0.00057), room=128)}  # fmt: skip
    two = {ROLLOUT: role(16, 1200, 128, 4), JUDGE: role(16, 1760, 128, 1), CRITIC: role(16, 1760, 128, 1)}
    constant = {JUDGE: (825.0, 0.0)}
    return [
        Drawn("equal verdicts", 32, wide, work(1500, 0.8, constant, 128, 1.0), 15.0),
        Drawn("equal verdicts, large batch", 32, wide, work(1500, 0.8, constant, 512, 1.0), 15.0),
        Drawn(
            "two GenRMs", 12, two, work(1500, 0.8, {JUDGE: (600, 0.15), CRITIC: (300, 0.1)}, 64, 0.5), 15.0
        ),
    ]


@dataclass(frozen=True)
class Compared:
    """The policy against the best fixed split; `error` is one standard error of `worse`, both fractions."""

    what: Drawn
    best: dict[str, int]
    best_s: float
    worse: float
    error: float

    def row(self) -> list[str]:
        work, roles = self.what.work, self.what.roles
        dropped = "none" if work.pass_rate == 1 else f"{1 - work.pass_rate:.0%}"
        return [
            self.what.name, str(self.what.num_slabs), str(len(roles) - 1), f"{self.what.switch_s:.0f} s",
            dropped, f"{self.best_s:.0f} s ({'+'.join(str(num) for num in self.best.values())})",
            f"{self.worse:+.1%}", f"{self.error:.1%}",
        ]  # fmt: skip


def compared(what: Drawn) -> Compared:
    """Simulates the fixed splits, and the policy from the split with the fewest slabs of rollout."""
    fixed = [(what.seconds(split, is_dynamic=False), split) for split in what.near_best()]
    least, best = min(fixed, key=lambda each: statistics.mean(each[0]))
    start = what.splits()[0]
    policy = what.seconds(start, is_dynamic=True)
    best_s = statistics.mean(least)
    more = [(ours - theirs) / best_s for ours, theirs in zip(policy, least, strict=True)]
    return Compared(what, best, best_s, statistics.mean(more), statistics.stdev(more) / math.sqrt(len(more)))


def run() -> dict[str, Any]:
    """Compares the policy in every workload."""
    found = [compared(each) for each in (*known(), *map(drawn, range(NUM_DRAWN)))]
    mean = statistics.mean(each.worse for each in found)
    sure = max(each.worse - 2 * each.error for each in found)
    certain = [each.worse for each in found if each.what.work.pass_rate == 1]
    targets = [
        ("mean of all workloads, policy / best fixed split", 0.01, mean),
        ("worst workload in which nothing is dropped", 0.02, max(certain)),
        ("worst workload, less two standard errors", 0.02, sure),
    ]
    return {
        "title": "The policy of the split in drawn workloads",
        "how": f"`yatt/forecast/time`, {NUM_DRAWN} drawn workloads (4 to 32 slabs, 1 or 2 GenRMs, lengths, "
        "rooms, speeds, shares of dropped groups, switch 0 to 30 s) and three in which an earlier policy was "
        "worse than a fixed split; the policy begins with one slab of rollout. Mean of the iterations "
        f"{FIRST + 1} to {NUM_ITERATIONS}, {SEEDS} seeds, against the fixed split that is best in hindsight, "
        f"of at most {MOST_FIXED}. Where groups are dropped, an iteration's time depends on luck: the error "
        "is that of the difference, and the best split in hindsight had luck.",
        "head": ["workload", "slabs", "GenRMs", "switch", "groups dropped", "best fixed split",
                 "policy against it", "standard error"],
        "rows": [each.row() for each in found],
        "targets": [
            {"what": what, "target": f"<= {wanted:+.0%}", "value": f"{value:+.1%}", "met": value <= wanted}
            for what, wanted, value in targets
        ],
    }  # fmt: skip
