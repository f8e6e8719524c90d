"""The prompt groups of one simulated batch: which are opened, accepted, dropped, cut and carried over.

How many are opened is decided by `yatt.core.samples.prompts.Quota`, as in a run. A group's samples, and
whether it is dropped, depend on its number only: settings that are compared sample the same groups.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from yatt.core.gpus.batch_loop import BatchSample
from yatt.core.samples.prompts import Acceptance, Quota, num_extra

NO_LIMIT = 1 << 40
"""Limit of the groups that may be opened: a simulated batch always ends."""

SampleMaker = Callable[[random.Random, int], BatchSample]
"""Draws one completion of an iteration: (random numbers, iteration from 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What each iteration samples.

    Attributes:
        pass_rate: fraction of groups that are kept; others are replaced.
        oversample: as `rollout.oversample`.
        max_cuts: maximum number of iterations that may cut the same group. 0: what is unfinished when a batch
            is full is thrown away.
    """

    draw: SampleMaker
    num_groups: int
    group_size: int
    pass_rate: float = 1.0
    oversample: float = 1.0
    max_cuts: int = 0


@dataclass(slots=True)
class SimulatedGroup:
    """One group. `samples` are those that still need tokens or verdicts."""

    tokens: float
    is_kept: bool
    samples: list[BatchSample]
    num_cuts: int = 0
    unsampled: int = 0
    unjudged: int = 0


@dataclass(frozen=True, slots=True)
class Carried:
    """What a batch leaves to the next one.

    Attributes:
        groups: cut ones, which continue first.
        accepted: tokens of each group that was accepted beyond the target.
        next_number: of the first group that was never opened.
    """

    groups: tuple[SimulatedGroup, ...] = ()
    accepted: tuple[float, ...] = ()
    next_number: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(slots=True)
class SimulatedGroups:
    """The groups of one batch.

    Attributes:
        tokens: of the completions of each accepted group, oldest first.
        asked: samples that the engines were asked for.
    """

    work: Workload
    iteration: int
    seed: int
    before: Carried = field(default_factory=Carried)
    quota: Quota = field(init=False)
    tokens: list[float] = field(init=False)
    asked: list[BatchSample] = field(default_factory=list)
    num_sampled: int = 0
    _next: int = field(init=False)
    _of: list[SimulatedGroup] = field(default_factory=list)
    _due: int = 0
    _due_unsampled: int = 0

    def __post_init__(self) -> None:
        self.quota = Quota(
            target=self.work.num_groups,
            accepted=len(self.before.accepted),
            limit=NO_LIMIT,
            extra=num_extra(self.work.num_groups, self.work.oversample),
            acceptance=self.before.acceptance,
        )
        self.tokens, self._next = list(self.before.accepted), self.before.next_number

    @property
    def is_full(self) -> bool:
        """Whether enough groups are accepted, and none is left that must not be cut again."""
        return self.quota.accepted >= self.quota.target and not self._due

    @property
    def is_enough_sampled(self) -> bool:
        """Whether the completely sampled groups will probably fill the batch."""
        return self.quota.is_expected_from(self.num_sampled) and not self._due_unsampled

    def first(self) -> list[BatchSample]:
        """Continues with the groups that were cut before, and opens as many more as are needed."""
        samples: list[BatchSample] = []
        for group in self.before.groups:
            samples += self._start(group)
        return samples + self.opened()

    def opened(self) -> list[BatchSample]:
        """Opens as many groups as are needed now; returns their samples."""
        samples: list[BatchSample] = []
        for _ in range(self.quota.num_to_open()):
            numbers = random.Random(f"{self.seed} {self._next}")
            self._next += 1
            drawn = [self.work.draw(numbers, self.iteration) for _ in range(self.work.group_size)]
            is_kept = numbers.random() < self.work.pass_rate
            samples += self._start(SimulatedGroup(sum(each.tokens for each in drawn), is_kept, drawn))
        return samples

    def judged(self, number: int) -> Sequence[BatchSample] | None:
        """Handles a sample's last verdict: more samples to open; None if the batch is full."""
        group = self._of[number]
        group.unjudged -= 1
        if group.unjudged:
            return ()
        self._resolve(group)
        return None if self.is_full else self.opened()

    def sampled(self, number: int) -> Sequence[BatchSample] | None:
        """Handles a sample's completion while GenRMs sleep: None if enough is sampled to judge it."""
        group = self._of[number]
        group.unsampled -= 1
        if not group.unsampled:
            self.num_sampled += 1
            self._due_unsampled -= self._is_due(group)
        return None if self.is_enough_sampled else ()

    def complete(self) -> dict[int, BatchSample]:
        """Returns the samples, by number, that are not judged yet and whose groups are completely sampled."""
        groups = ((number, group) for number, group in enumerate(self._of) if not group.unsampled)
        return {number: self.asked[number] for number, group in groups if group.unjudged}

    def carried(self, unfinished: dict[int, BatchSample]) -> Carried:
        """Returns what the next batch continues with.

        Args:
            unfinished: what samples of this batch still need, by number.
        """
        if not self.work.max_cuts:
            return Carried((), (), self._next, self.quota.acceptance)
        left: dict[int, SimulatedGroup] = {}
        for number, sample in sorted(unfinished.items()):
            group = self._of[number]
            if group.unjudged:
                cut = SimulatedGroup(group.tokens, group.is_kept, [], group.num_cuts + 1)
                left.setdefault(id(group), cut).samples.append(sample)
        surplus = tuple(self.tokens[self.work.num_groups :])
        return Carried(tuple(left.values()), surplus, self._next, self.quota.acceptance)

    def _start(self, group: SimulatedGroup) -> list[BatchSample]:
        group.unjudged = len(group.samples)
        group.unsampled = sum(sample.tokens > 0 for sample in group.samples)
        self.asked += group.samples
        self._of += [group] * len(group.samples)
        self.quota = self.quota.opened(1)
        self._due += self._is_due(group)
        self._due_unsampled += self._is_due(group) and bool(group.unsampled)
        self.num_sampled += not group.unsampled
        return group.samples

    def _resolve(self, group: SimulatedGroup) -> None:
        self.quota = self.quota.resolved(accepted=group.is_kept)
        self.num_sampled -= 1
        self._due -= self._is_due(group)
        if group.is_kept:
            self.tokens.append(group.tokens)

    def _is_due(self, group: SimulatedGroup) -> bool:
        """Whether the group must not be cut again."""
        return 0 < self.work.max_cuts <= group.num_cuts
