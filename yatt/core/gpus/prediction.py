"""How long a split takes for a batch, predicted from what was measured. Pure.

Runs a batch on models of engines (`yatt.core.gpus.engine_model`) with the lengths that were seen. A role's
engines are one model, which shares requests evenly at first; a slab that comes later is another, which takes
only what no engine has yet. Groups are opened by the rule of a run (`yatt.core.samples.prompts.Quota`): as
many as the share that is kept needs. Whether a group is kept follows a regular pattern, so good and bad luck
are left out. Verdicts begin when their completion is complete, and slabs move by the rules of
`yatt.core.gpus.tail`.

Where roles take turns, nothing waits beside anything else: each role's engines have the whole batch, one role
after the other, and all slabs switch in between. What is missing because more groups were dropped than
expected then needs further turns (`LATE_TURNS`).

A large batch is predicted by a part of it, on the same part of the engines. What a batch cuts, and what it
continues with, are left out.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from yatt.core.gpus.batch_loop import BatchLoop, BatchSample
from yatt.core.gpus.engine_model import EngineModel, Request
from yatt.core.gpus.tail import (
    RoleSpeed,
    Split,
    can_spare,
    is_worth,
    late_samples,
    longest_queue,
    takes_turns,
)
from yatt.core.samples.prompts import MOST_AHEAD

NEVER_S = 1e9
"""Seconds of a switch that no backlog is worth: nothing moves within a batch."""

MOST_PREDICTED, MOST_IF_DROPPED = 384, 768
"""Number of samples that a prediction looks at, at most; the second one where groups are dropped, because
it then depends more on which ones end last."""


LEAST_ROOM = 4
"""Engines that a role gets count from so much room in the part of the system that is predicted."""

LEAST_KEPT = 0.01
"""A smaller share of kept groups counts as this one."""

MOST_QUESTIONS = 8
"""More questions about a completion are modelled as so many: their number then changes a prediction little,
and each takes time to predict."""

LATE_TURNS = 0.5
"""Share of the batches whose first turns leave groups missing, because more are dropped than expected."""

MOST_ADDITIONS = 8
"""Number of times at which engines that a role gets are modelled apart."""


def modelled_questions(mean: float) -> int:
    """Returns how many questions about each completion a model asks, if a GenRM gets so many in the mean."""
    return max(1, min(round(mean), MOST_QUESTIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDemand:
    """What a batch asks for.

    Attributes:
        completions: tokens of each completion that was seen.
        verdicts: tokens of each GenRM's verdicts on the same completions, by role.
        num_samples: completions that a batch needs, those that are dropped later included.
        group_size: completions of a prompt group.
        kept: share of the groups that are not dropped.
    """

    completions: Sequence[float]
    verdicts: Mapping[str, Sequence[float]]
    num_samples: int
    group_size: int = 1
    kept: float = 1.0

    @property
    def num_late(self) -> float:
        """Samples that may be needed beyond those that are expected (`late_samples`)."""
        return late_samples(self.num_samples, self.group_size, min(max(self.kept, LEAST_KEPT), 1.0))


@dataclass(frozen=True, slots=True)
class Effort:
    """How far a prediction looks.

    Attributes:
        times: so many times as many samples. Where groups are dropped, chance then matters less.
        limit_s: a batch that takes longer is not looked at to its end; the result is more than this.
    """

    times: int = 1
    limit_s: float = math.inf


USUAL = Effort()


def predicted_seconds(
    split: Split,
    demand: BatchDemand,
    roles: Mapping[str, RoleSpeed],
    rollout: str,
    switch_s: float,
    *,
    effort: Effort = USUAL,
) -> float:
    """Returns seconds from the first request of a batch to its last verdict, with the moves of
    `yatt.core.gpus.tail` in it, or the switches between turns.
    """
    if takes_turns(split, rollout):
        return _seconds_of_turns(split, demand, roles, rollout, switch_s, effort)
    return _seconds_of(split, demand, roles, rollout, switch_s, effort)


def _seconds_of(
    split: Split,
    demand: BatchDemand,
    roles: Mapping[str, RoleSpeed],
    rollout: str,
    switch_s: float,
    effort: Effort,
) -> float:
    groups = _RegularGroups(demand, effort.times)
    fleets = _Fleets(split, demand, roles, rollout, switch_s, groups.scale)
    judges = {role: roles[role].questions for role in demand.verdicts}
    batch = BatchLoop(fleets, rollout, judges, groups.judged)
    batch.open(groups.opened())
    return batch.run(effort.limit_s)


def _seconds_of_turns(
    split: Split,
    demand: BatchDemand,
    roles: Mapping[str, RoleSpeed],
    rollout: str,
    switch_s: float,
    effort: Effort,
) -> float:
    """Seconds of the turns of a batch, and of the share of batches that need turns for late samples."""
    slabs = split[rollout]
    lengths = {rollout: demand.completions, **demand.verdicts}
    late = math.ceil(demand.num_late)
    seconds = len(demand.verdicts) * switch_s + LATE_TURNS * bool(late) * len(lengths) * switch_s
    for role, tokens in lengths.items():
        questions = roles[role].questions if role != rollout else 1
        each = [whole / questions for whole in tokens]
        for share, num in ((1.0, demand.num_samples), (LATE_TURNS, late)):
            if num:
                turn = BatchDemand(completions=each, verdicts={}, num_samples=num * questions)
                only = {role: roles[role]}
                seconds += share * _seconds_of({role: slabs}, turn, only, role, NEVER_S, effort)
        if seconds > effort.limit_s:
            break
    return seconds


class _RegularGroups:
    """The groups of a predicted batch: of each, whether it is kept follows a regular pattern.

    `scale`: how many times as large the whole batch is.
    """

    def __init__(self, demand: BatchDemand, times: int) -> None:
        self._size = max(demand.group_size, 1)
        groups = max(round(demand.num_samples / self._size), 1)
        most = max(times * (MOST_PREDICTED if demand.kept >= 1 else MOST_IF_DROPPED) // self._size, 8)
        num_groups, self._kept = min(groups, most), min(max(demand.kept, LEAST_KEPT), 1.0)
        self.scale = groups / num_groups
        self._missing = max(round(num_groups * self._kept), 1)
        self._samples = _mixed(demand, num_groups * self._size)
        self._left: list[int] = []  # samples that are not judged, by group
        self._in_flight = 0

    def opened(self) -> list[BatchSample]:
        """Opens as many groups as are probably needed."""
        wanted = min(math.ceil(self._missing / self._kept - 1e-9), MOST_AHEAD * self._missing)
        num, first = max(wanted - self._in_flight, 0), len(self._left) * self._size
        self._left += [self._size] * num
        self._in_flight += num
        numbers = range(first, first + num * self._size)
        return [self._samples[number % len(self._samples)] for number in numbers]

    def judged(self, number: int) -> list[BatchSample] | None:
        """Handles a sample's last verdict; a group that is dropped is replaced."""
        group = number // self._size
        self._left[group] -= 1
        if self._left[group]:
            return []
        self._in_flight -= 1
        self._missing -= math.floor((group + 1) * self._kept + 1e-9) > math.floor(group * self._kept + 1e-9)
        return self.opened() if self._missing > 0 else None


class _Fleets:
    """The engines of all roles, and the slabs that rollout gives to GenRMs, as in a run."""

    def __init__(
        self,
        split: Split,
        demand: BatchDemand,
        roles: Mapping[str, RoleSpeed],
        rollout: str,
        switch_s: float,
        scale: float,
    ) -> None:
        self._roles, self._rollout, self._switch_s, self._scale = roles, rollout, switch_s, scale
        self._slabs, self._num_late = dict(split), demand.num_late
        self._of = {
            role: _Fleet(roles[role], split[role], scale, is_uneven=role == rollout)
            for role in (rollout, *demand.verdicts)
        }
        self._coming: list[tuple[float, str]] = []  # a heap: second at which a slab's engines begin, role

    def submit(self, role: str, request: int, tokens: float, now_s: float) -> None:
        """See `batch_loop.Fleet`."""
        self._of[role].add(Request(str(request), tokens), now_s)

    def assign(self, batch: BatchLoop) -> None:
        """Nothing waits."""

    def next_s(self) -> float:
        """See `batch_loop.Fleet`."""
        end_s = min(fleet.next_end_s() for fleet in self._of.values())
        return min(end_s, self._coming[0][0]) if self._coming else end_s

    def work(self, batch: BatchLoop) -> None:
        """Moves all engines to this moment, then slabs."""
        now_s = batch.now_s
        begins = self._coming[0] if self._coming and self._coming[0][0] <= now_s else None
        ended = [(role, key) for role, fleet in self._of.items() for key in fleet.advance(now_s)]
        for role, key in ended:
            batch.ended(role, int(key))
        num = 0
        while begins and self._coming and self._coming[0] == begins:
            heapq.heappop(self._coming)
            num += 1
        if begins:
            self._of[begins[1]].grow(now_s, num)
        self._move(batch)

    def _move(self, batch: BatchLoop) -> None:
        fleet, speed = self._of[self._rollout], self._roles[self._rollout]
        num_sampling = batch.num_open[self._rollout]
        if fleet.num_running < num_sampling:
            return
        alive = num_sampling * self._scale + self._num_late
        while can_spare(alive, self._slabs[self._rollout], speed):
            backlog = {role: tokens * self._scale for role, tokens in batch.backlog.items()}
            asked = {role: self._of[role].num_requests * self._scale for role in backlog}
            role, queue_s = longest_queue(backlog, asked, self._slabs, self._roles)
            if not role or not is_worth(queue_s, self._switch_s):
                return
            self._slabs[self._rollout] -= 1
            self._slabs[role] += 1
            fleet.shrink(self._slabs[self._rollout])
            heapq.heappush(self._coming, (batch.now_s + self._switch_s, role))


class _Fleet:
    """One role's engines. Those of the beginning share their requests evenly; those of a slab that comes
    later get only requests that have no engine yet, because what runs stays where it is.

    Args:
        is_uneven: as requests end, some engines keep more of them than others. Verdicts come one by one, to
            the emptiest engine, and remain even.
    """

    def __init__(self, speed: RoleSpeed, slabs: int, scale: float, *, is_uneven: bool) -> None:
        self._speed, self._scale = speed, scale
        self._unevenness = 1 - 1 / (slabs * speed.engines) if is_uneven else 0.0
        self._models, self._rooms, self._slabs = list[EngineModel](), list[int](), list[int]()
        self._waiting, self._small = deque[Request](), 0
        self.grow(0.0, slabs)

    @property
    def num_requests(self) -> int:
        """Number of requests that run or wait."""
        return len(self._waiting) + self.num_running

    @property
    def num_running(self) -> int:
        """Number of requests that an engine has."""
        return sum(model.num_requests for model in self._models)

    def next_end_s(self) -> float:
        """When the next request ends; infinity if none runs."""
        return min(model.next_end_s() for model in self._models)

    def add(self, request: Request, now_s: float) -> None:
        """Adds a request at a moment to which everything was advanced."""
        self._waiting.append(request)
        self._fill(now_s)

    def advance(self, now_s: float) -> list[str]:
        """Moves to `now_s`; returns the keys of what has ended."""
        ended = [key for model in self._models for _, key in model.advance(now_s)]
        self._fill(now_s)
        return ended

    def grow(self, now_s: float, slabs: int) -> None:
        """Adds the engines of so many slabs; those of a part too small for requests wait for more. Of many
        additions, the last ones count as one."""
        slabs, self._small = slabs + self._small, 0
        if self._models and self._scale > 1 and self._size(slabs)[1] < LEAST_ROOM:
            self._small = slabs
        elif len(self._models) == MOST_ADDITIONS:
            self._resize(-1, self._slabs[-1] + slabs)
        else:
            engines, room = self._size(slabs)
            model = EngineModel(self._speed.speed, room, now_s, engines=engines, unevenness=self._unevenness)
            self._models.append(model)
            self._rooms.append(room)
            self._slabs.append(slabs)
        self._fill(now_s)

    def shrink(self, slabs: int) -> None:
        """Leaves the engines of so many of the slabs that it had at the beginning."""
        self._resize(0, slabs)

    def _resize(self, index: int, slabs: int) -> None:
        engines, room = self._size(slabs)
        self._slabs[index], self._rooms[index] = slabs, room
        self._models[index].resize(engines, room)

    def _size(self, slabs: int) -> tuple[float, int]:
        """Number of engines and their room, in the part of the system that is predicted."""
        engines = slabs * self._speed.engines / self._scale
        return engines, max(round(engines * self._speed.room), 1)

    def _fill(self, now_s: float) -> None:
        """Gives what waits to the emptiest engines with room."""
        while self._waiting:
            loads = [model.num_requests / room for model, room in zip(self._models, self._rooms, strict=True)]
            load, index = min((each, number) for number, each in enumerate(loads))
            if load >= 1:
                return
            self._models[index].add(self._waiting.popleft(), now_s)


def _mixed(demand: BatchDemand, num: int) -> list[BatchSample]:
    """Takes `num` of the samples, in an order that is drawn once. Long completions get long verdicts."""
    columns = [
        _spread(sorted(each), num, demand.num_samples)
        for each in (demand.completions, *demand.verdicts.values())
    ]
    samples = [
        BatchSample(tokens, dict(zip(demand.verdicts, verdicts, strict=True)))
        for tokens, *verdicts in zip(*columns, strict=True)
    ]
    random.Random(0).shuffle(samples)
    return samples


def _spread(items: Sequence[float], num: int, whole: int) -> list[float]:
    """Takes `num` of sorted items at even distances. The last one is as long as the longest of `whole` items
    is likely to be."""
    shares = [(i + 0.5) / num for i in range(num - 1)] + [1 - 0.5 / max(whole, num)]
    return [items[min(int(share * len(items)), len(items) - 1)] for share in shares]
