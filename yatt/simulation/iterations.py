"""Simulates the sampling of many iterations: a fixed or dynamic split, or all engines taking turns."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from yatt.core.placement import ROLLOUT
from yatt.core.split import BatchDemand, Split, choose
from yatt.simulation.sampling import SimulatedBatch, SimulatedOutcome, SimulatedSample, SimulatedSetting

REMEMBERED = 2
"""Number of batches whose lengths the policy remembers."""

SampleMaker = Callable[[random.Random, int], SimulatedSample]
"""Draws one completion of an iteration: (random numbers, iteration from 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What each iteration samples.

    Attributes:
        pass_rate: fraction of groups that are kept; others are replaced.
        oversample: multiple of the groups that are opened at the beginning.
    """

    draw: SampleMaker
    num_groups: int
    group_size: int
    pass_rate: float = 1.0
    oversample: float = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedIteration:
    """One iteration: its split at first, its seconds with the switch to the trainer, and its moves."""

    split: dict[str, int]
    seconds: float
    moves: int


class _Groups:
    """The groups of one batch: which are kept, and what replaces the others."""

    def __init__(self, work: Workload, iteration: int, seed: int) -> None:
        self._work, self._iteration = work, iteration
        self._random = random.Random(f"{seed} {iteration}")
        self._left: list[int] = []
        self._kept = 0
        self.samples: list[SimulatedSample] = []

    def open(self, num: int) -> list[SimulatedSample]:
        """Draws so many groups."""
        size = self._work.group_size
        drawn = [self._work.draw(self._random, self._iteration) for _ in range(num * size)]
        self.samples += drawn
        self._left += [size] * num
        return drawn

    def judged(self, number: int) -> Sequence[SimulatedSample] | None:
        """Handles a sample's last verdict: more samples to open; None if the batch is full."""
        group = number // self._work.group_size
        self._left[group] -= 1
        if self._left[group]:
            return ()
        if self._random.random() >= self._work.pass_rate:
            return self.open(1)
        self._kept += 1
        return None if self._kept == self._work.num_groups else ()


def partial_iterations(
    setting: SimulatedSetting, split: Split, work: Workload, num_iterations: int, seed: int
) -> list[SimulatedIteration]:
    """Iterations in which rollout and GenRMs have slabs at the same time. With a dynamic setting, the policy
    chooses each one's split from the batches before, and moves slabs within a batch."""
    iterations, now = list[SimulatedIteration](), dict(split)
    seen: list[list[SimulatedSample]] = []
    for iteration in range(num_iterations):
        if setting.is_dynamic and seen:
            demand = _demand(list(itertools.chain(*seen[-REMEMBERED:])), len(seen[-1]))
            now = choose(
                [each.split for each in iterations], demand, setting.roles, ROLLOUT, setting.switch_s
            )
        groups = _Groups(work, iteration, seed)
        batch = SimulatedBatch(setting, now, groups.judged)
        outcome = batch.run(groups.open(math.ceil(work.num_groups * work.oversample)))
        seen.append(groups.samples)
        iterations.append(SimulatedIteration(now, outcome.seconds + setting.switch_s, len(outcome.moves)))
    return iterations


def colocated_iterations(
    setting: SimulatedSetting, num_slabs: int, work: Workload, num_iterations: int, seed: int
) -> list[SimulatedIteration]:
    """Iterations in which all slabs sample, then all judge, and again for the groups that were dropped."""
    iterations = []
    for iteration in range(num_iterations):
        draw, seconds, kept = random.Random(f"{seed} {iteration}"), 0.0, 0
        over = work.oversample
        while kept < work.num_groups:
            num = math.ceil((work.num_groups - kept) * over)
            over = 1 / work.pass_rate
            samples = [work.draw(draw, iteration) for _ in range(num * work.group_size)]
            for role in setting.roles:
                seconds += _alone(setting, role, num_slabs, samples).seconds + setting.switch_s
            kept += sum(draw.random() < work.pass_rate for _ in range(num))
        iterations.append(SimulatedIteration({ROLLOUT: num_slabs}, seconds, 0))
    return iterations


def _alone(
    setting: SimulatedSetting, role: str, num_slabs: int, samples: Sequence[SimulatedSample]
) -> SimulatedOutcome:
    """One role's work on all slabs."""
    only = replace(setting, roles={ROLLOUT: setting.roles[role]}, is_dynamic=False)
    asked = [SimulatedSample(each.tokens if role == ROLLOUT else each.verdicts[role], {}) for each in samples]
    return SimulatedBatch(only, {ROLLOUT: num_slabs}, lambda _: ()).run(asked)


def _demand(samples: Sequence[SimulatedSample], num: int) -> BatchDemand:
    judges = samples[0].verdicts if samples else ()
    return BatchDemand(
        completions=[each.tokens for each in samples],
        verdicts={role: [each.verdicts[role] for each in samples] for role in judges},
        num_samples=num,
    )
