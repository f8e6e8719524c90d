"""The order of prompts, and how many to open: pure, and the same after every resume.

Prompts are numbered from 0 over the whole run; number i is row ``order[i % rows]`` of data epoch
``i // rows``. Owner k of N owns the numbers with ``i % N == k``.
"""

import heapq
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace


def row_order(num_rows: int, *, seed: int, data_epoch: int, shuffle: bool) -> list[int]:
    """Rows in the order of one data epoch."""
    order = list(range(num_rows))
    if shuffle:
        random.Random(f"prompts/{seed}/{data_epoch}").shuffle(order)
    return order


def first_number(shard: int, num_shards: int, *, at_least: int) -> int:
    """The smallest prompt number of data shard `shard` that is not below `at_least`."""
    return at_least + (shard - at_least) % num_shards


def share(batch: int, *, shard: int, num_shards: int, first: int) -> int:
    """How many of the prompt numbers ``first .. first + batch - 1`` are of this data shard."""
    start = first_number(shard, num_shards, at_least=first)
    return max(0, math.ceil((first + batch - start) / num_shards))


def sample_seed(seed: int, prompt_number: int, index: int, retry: int = 0) -> int:
    """Seed of one completion: a function of what it is, not of when it is asked for."""
    return random.Random(f"sample/{seed}/{prompt_number}/{index}/{retry}").getrandbits(31)


WINDOW = 128
"""Prompt groups after which an outcome weighs about a third in the estimate of the acceptance rate."""

MOST_AHEAD = 4
"""Groups in flight for each one that is missing, at most: a bad estimate must not flood the engines."""

LEAST_OPENED = 48
"""Groups that may always be opened in an iteration: a small share is exhausted by bad luck otherwise."""


PATIENCE = 4
"""Times the limit that bad luck may take. With 21 % accepted, 48 groups give fewer than 3 in one iteration of
a thousand."""


def opening_limit(target: int, factor: float) -> int:
    """Groups that a trainer node may open in one iteration for a share of `target` groups, whatever the
    acceptance rate is; `Quota.most` is how many more while the rate promises that they will do."""
    return max(target, int(target * factor), LEAST_OPENED)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many of the newest prompt groups were accepted, with older outcomes fading out."""

    accepted: float = 0.0
    resolved: float = 0.0

    def after(self, *, accepted: bool) -> "Acceptance":
        """The estimate with one more outcome."""
        keep = 1.0 - 1.0 / WINDOW
        return Acceptance(self.accepted * keep + accepted, self.resolved * keep + 1.0)

    @property
    def rate(self) -> float:
        """Share that is accepted, in (0, 1], by Laplace's rule of requeue: a bad start does not flood."""
        return (self.accepted + 1.0) / (self.resolved + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Counts one trainer node's prompt groups of one iteration. `dropped` are this iteration's only."""

    target: int
    accepted: int = 0
    dropped: int = 0
    in_flight: int = 0
    limit: int = 0
    """Groups that may be opened in one iteration, whatever the acceptance rate is."""

    is_patient: bool = False
    """Bad luck is always waited out: the rate of late depends on what ended first, and on restarts."""

    acceptance: Acceptance = Acceptance()
    """Outlives the iteration: the next one begins with what this one learnt."""

    @property
    def most(self) -> int:
        """Groups that may be opened in one iteration: more than the limit if twice the limit would give the
        target at the acceptance rate of late. Then it is bad luck that is waited out, but not for ever."""
        is_bad_luck = self.is_patient or 2 * self.limit * self.acceptance.rate >= self.target
        return PATIENCE * self.limit if is_bad_luck else self.limit

    def num_to_open(self) -> int:
        """Groups to open now, so that what is in flight will probably fill the target.

        That is what is missing, divided by the acceptance rate of late, and at most `MOST_AHEAD` for each
        missing one.
        """
        missing = self.target - self.accepted
        if missing <= 0:
            return 0
        wanted = min(math.ceil(missing / self.acceptance.rate), MOST_AHEAD * missing) - self.in_flight
        left = self.most - self.accepted - self.dropped - self.in_flight
        return max(0, min(wanted, left))

    def is_exhausted(self) -> bool:
        """Whether the target cannot be met any more."""
        return self.accepted + self.in_flight < self.target and self.num_to_open() == 0

    def shortfall(self) -> str:
        """How far the target was missed, as the beginning of an error message."""
        return (
            f"{self.dropped} of {self.accepted + self.dropped} prompt groups were dropped and "
            f"{self.accepted} of {self.target} accepted in this iteration: too few to go on"
        )

    def opened(self, num: int) -> "Quota":
        """After opening `num` more."""
        return replace(self, in_flight=self.in_flight + num)

    def resolved(self, *, accepted: bool) -> "Quota":
        """After one group in flight was accepted or dropped."""
        return replace(
            self,
            in_flight=self.in_flight - 1,
            accepted=self.accepted + accepted,
            dropped=self.dropped + (not accepted),
            acceptance=self.acceptance.after(accepted=accepted),
        )


class InOrder:
    """Counts the accepted prompt groups below the lowest unfinished one, as groups are opened and resolved.

    Groups are opened in the order of their numbers, so that number never falls, and each group is looked at
    a few times in all.
    """

    def __init__(self, accepted: Iterable[int], unfinished: Iterable[int]) -> None:
        self._waiting, self._open = list(accepted), list(unfinished)
        heapq.heapify(self._waiting)
        heapq.heapify(self._open)
        self._resolved: set[int] = set()
        self._count = 0

    def opened(self, number: int) -> None:
        """One more is unfinished."""
        heapq.heappush(self._open, number)

    def resolved(self, number: int, *, accepted: bool) -> None:
        """One that was unfinished is accepted or dropped."""
        self._resolved.add(number)
        if accepted:
            heapq.heappush(self._waiting, number)

    def num_in_order(self) -> int:
        """Accepted groups with no unfinished one below them."""
        while self._open and self._open[0] in self._resolved:
            self._resolved.discard(heapq.heappop(self._open))
        while self._waiting and (not self._open or self._waiting[0] < self._open[0]):
            heapq.heappop(self._waiting)
            self._count += 1
        return self._count


HANDFUL = 8
"""Prompt groups that may fail by the user's code before the first success, until the run is ended for it."""


@dataclass(frozen=True, slots=True)
class Trials:
    """Whether the user's functions ever worked: failures before the first group that did not fail by them."""

    failed: int = 0
    has_worked: bool = False

    def after(self, *, is_users_failure: bool) -> "Trials":
        """One more group is resolved."""
        if self.has_worked or not is_users_failure:
            return Trials(self.failed, True)
        return Trials(self.failed + 1)

    @property
    def is_hopeless(self) -> bool:
        """Whether going on would only repeat the failure."""
        return not self.has_worked and self.failed >= HANDFUL
