"""Simulates the sampling of many iterations: a fixed or dynamic split, or all engines taking turns."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from yatt.core.gpus.batch_loop import BatchSample, More
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.gpus.prediction import BatchDemand
from yatt.core.gpus.split import choose_split
from yatt.core.gpus.tail import Split, takes_turns
from yatt.forecast.time.groups import Carried, SimulatedGroups, Workload
from yatt.forecast.time.sampling import BatchTrace, SimulatedBatch, SimulatedOutcome, SimulatedSetting

REMEMBERED = 2
"""Number of batches whose lengths the policy remembers."""


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """One role on all slabs, from `begin_s` in a batch; what its slabs did."""

    role: str
    begin_s: float
    trace: BatchTrace


@dataclass(frozen=True, slots=True)
class SimulatedIteration:
    """One iteration of sampling and judging.

    Attributes:
        split: slabs at first, by role.
        seconds: with `switch_s`.
        moves: number of slabs that moved to another role while completions were sampled.
        switch_s: of `seconds`, those in which all slabs switch: between roles that take turns, and at the
            end.
        busy_s: see `SimulatedOutcome`.
        held_s: see `SimulatedOutcome`.
        tokens: of the completions of all groups that are trained on.
        records: a record of what the slabs did; empty unless it was wanted.
    """

    split: dict[str, int]
    seconds: float
    moves: int
    switch_s: float
    busy_s: Mapping[str, float]
    held_s: Mapping[str, float]
    tokens: float
    records: tuple[RecordedBatch, ...] = ()


@dataclass(slots=True)
class _Sum:
    """Seconds of several outcomes of one iteration."""

    seconds: float = 0.0
    switch_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    held_s: dict[str, float] = field(default_factory=dict)
    records: list[RecordedBatch] = field(default_factory=list)

    def add(self, role: str, outcome: SimulatedOutcome, switch_s: float, trace: BatchTrace | None) -> None:
        """Adds the work of one role, and the switch after it."""
        if trace is not None:
            self.records.append(RecordedBatch(role, self.seconds, trace))
        self.seconds += outcome.seconds + switch_s
        self.switch_s += switch_s
        self.busy_s[role] = self.busy_s.get(role, 0.0) + outcome.busy_s[ROLLOUT]
        self.held_s[role] = self.held_s.get(role, 0.0) + outcome.held_s[ROLLOUT]


def partial_iterations(
    setting: SimulatedSetting,
    split: Split,
    work: Workload,
    num_iterations: int,
    seed: int,
    *,
    traced: int = -1,
) -> list[SimulatedIteration]:
    """Iterations in which rollout and GenRMs have slabs at the same time. With a dynamic setting, the policy
    chooses each one's split from the batches before, or that they take turns, and moves slabs within a batch.

    Args:
        traced: iteration whose slabs are recorded.
    """
    iterations, now, before = list[SimulatedIteration](), dict(split), Carried()
    seen: list[list[BatchSample]] = []
    for iteration in range(num_iterations):
        if setting.is_dynamic and seen:
            demand = batch_demand(seen[-REMEMBERED:], work, [*split])
            now = choose_split(
                [each.split for each in iterations],
                demand,
                setting.roles,
                ROLLOUT,
                setting.switch_s,
                may_turn=setting.may_turn,
            )
            setting = replace(setting, num_late=demand.num_late)
        groups = SimulatedGroups(work, iteration, seed, before)
        if takes_turns(now, ROLLOUT):
            found, before = _turned(setting, now, groups, is_traced=iteration == traced)
            seen.append(groups.asked)
            iterations.append(found)
            continue
        trace = BatchTrace() if iteration == traced else None
        batch = SimulatedBatch(setting, now, groups.judged, trace)
        outcome = batch.run(groups.first())
        before = groups.carried(batch.unfinished())
        seen.append(groups.asked)
        switch_s = setting.switch_s if setting.is_shared else 0.0
        iterations.append(
            SimulatedIteration(
                now,
                outcome.seconds + switch_s,
                len(outcome.moves),
                switch_s,
                outcome.busy_s,
                outcome.held_s,
                sum(groups.tokens[: work.num_groups]),
                (RecordedBatch("", 0.0, trace),) if trace is not None else (),
            )
        )
    return iterations


def colocated_iterations(
    setting: SimulatedSetting,
    num_slabs: int,
    work: Workload,
    num_iterations: int,
    seed: int,
    *,
    traced: int = -1,
) -> list[SimulatedIteration]:
    """Iterations in which all slabs sample, then all judge, and again for the groups that were dropped."""
    iterations, before = [], Carried()
    for iteration in range(num_iterations):
        groups = SimulatedGroups(work, iteration, seed, before)
        found, before = _turned(setting, {ROLLOUT: num_slabs}, groups, is_traced=iteration == traced)
        iterations.append(found)
    return iterations


def _turned(
    setting: SimulatedSetting, split: Split, groups: SimulatedGroups, *, is_traced: bool
) -> tuple[SimulatedIteration, Carried]:
    """One iteration in which rollout and GenRMs have all slabs in turn, and what it leaves."""
    spent, left = _taking_turns(setting, split[ROLLOUT], groups, is_traced=is_traced)
    found = SimulatedIteration(
        dict(split),
        spent.seconds,
        0,
        spent.switch_s,
        spent.busy_s,
        spent.held_s,
        sum(groups.tokens[: groups.work.num_groups]),
        tuple(spent.records),
    )
    return found, left


def _taking_turns(
    setting: SimulatedSetting, num_slabs: int, groups: SimulatedGroups, *, is_traced: bool
) -> tuple[_Sum, Carried]:
    """One iteration of roles that take records: what it took, and what it leaves."""
    spent, left = _Sum(), dict[int, float]()  # tokens that a sample still needs, if it was sampled before

    def work(role: str, samples: Mapping[int, float], more: More) -> None:
        trace = BatchTrace() if is_traced else None
        only = replace(setting, roles={ROLLOUT: setting.roles[role]}, is_dynamic=False)
        batch = SimulatedBatch(only, {ROLLOUT: num_slabs}, more, trace)
        questions = setting.roles[role].questions
        texts = [BatchSample(tokens / questions, {}) for tokens in samples.values() for _ in range(questions)]
        outcome = batch.run(texts)
        spent.add(role, outcome, setting.switch_s, trace)
        if role == ROLLOUT:
            cut, numbers = batch.unfinished(), [*samples]
            left.update({n: cut[i].tokens if i in cut else 0.0 for i, n in enumerate(numbers)})

    def unsampled() -> dict[int, float]:
        found = {n: left.get(n, sample.tokens) for n, sample in enumerate(groups.asked)}
        return {n: tokens for n, tokens in found.items() if tokens > 0}

    groups.first()
    judges = [role for role in setting.roles if role != ROLLOUT]
    while not groups.is_full:
        if not groups.is_enough_sampled:
            asked = unsampled()
            numbers = [*asked]
            work(ROLLOUT, asked, functools.partial(_sampled, groups, numbers))
        complete = groups.complete()
        for role in judges:
            work(role, {n: sample.verdicts[role] for n, sample in complete.items()}, lambda _: ())
        for number in complete:
            groups.judged(number)
    unfinished = {
        n: BatchSample(left.get(n, sample.tokens), sample.verdicts) for n, sample in enumerate(groups.asked)
    }
    return spent, groups.carried(unfinished)


def _sampled(groups: SimulatedGroups, numbers: Sequence[int], index: int) -> Sequence[BatchSample] | None:
    """Handles the end of a completion: None if enough is sampled."""
    return groups.sampled(numbers[index])


def batch_demand(
    batches: Sequence[Sequence[BatchSample]], work: Workload, roles: Sequence[str]
) -> BatchDemand:
    """Returns what the next batch asks of these roles, for the policy: the mean of such batches."""
    judges, samples = [role for role in roles if role != ROLLOUT], list(itertools.chain(*batches))
    num = len(samples) / len(batches)
    return BatchDemand(
        completions=[each.tokens for each in samples],
        verdicts={role: [each.verdicts.get(role, 0.0) for each in samples] for role in judges},
        num_samples=round(num),
        group_size=work.group_size,
        kept=min(work.num_groups * work.group_size / num, 1.0),
    )
