"""The order of prompts, and the number of prompt groups to open. Pure, and the same after every resume.

Prompts are numbered from 0 over the whole run; number i is row ``order[i % N]`` of data epoch ``i // N``, of
N prompts each. Data shard k of N has the numbers with ``i % N == k``.
"""

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RowSource:
    """A data file: its number of rows, and how often a data epoch has each of them."""

    num_rows: int
    weight: float = 1.0

    @property
    def num_extra(self) -> int:
        """Rows that a data epoch has once more often than the others."""
        return round(self.num_rows * (self.weight - int(self.weight)))

    @property
    def num_prompts(self) -> int:
        """Prompts of a data epoch."""
        return self.num_rows * int(self.weight) + self.num_extra


def row_order(sources: Sequence[RowSource], *, seed: int, data_epoch: int, shuffle: bool) -> list[int]:
    """Returns the rows in the order of one data epoch. The rows of all sources are numbered one after the
    other."""
    order: list[int] = []
    first = 0
    for number, source in enumerate(sources):
        rows = range(first, first + source.num_rows)
        order += list(rows) * int(source.weight)
        if source.num_extra:
            draw = random.Random(f"weights/{seed}/{data_epoch}/{number}")
            order += sorted(draw.sample(rows, source.num_extra))
        first += source.num_rows
    if shuffle:
        random.Random(f"prompts/{seed}/{data_epoch}").shuffle(order)
    return order


def first_number(shard: int, num_shards: int, *, at_least: int) -> int:
    """Returns the smallest prompt number of data shard `shard` that is not below `at_least`."""
    return at_least + (shard - at_least) % num_shards


@dataclass(frozen=True, slots=True)
class PromptNumbers:
    """The prompt numbers that one data shard has not opened yet; it opens the lowest one first.

    Nodes get apart, since some leave out or drop more than others. If their number changes then, the numbers
    from which some of them were to go on are below the others': these are `left` over.

    Args:
        next: a number; this shard has its own ones from there on.
        left: numbers below `next`, in rising order each.
    """

    shard: int
    num_shards: int
    next: int = 0
    left: tuple[range, ...] = ()

    @property
    def own(self) -> int:
        """The lowest number that is not left over."""
        return first_number(self.shard, self.num_shards, at_least=self.next)

    @property
    def lowest(self) -> int:
        """The number to open now."""
        return min((numbers[0] for numbers in self.left), default=self.own)

    def has(self, number: int) -> bool:
        """Whether this shard is to open this number."""
        is_own = number >= self.next and number % self.num_shards == self.shard
        return is_own or any(number in numbers for numbers in self.left)

    def after(self, number: int) -> "PromptNumbers":
        """Returns the numbers above this one."""
        left = (numbers[max(0, (number - numbers.start) // numbers.step + 1) :] for numbers in self.left)
        return replace(self, next=max(self.next, number + 1), left=tuple(filter(None, left)))

    def first_left(self, most: int) -> frozenset[int]:
        """Returns the lowest of the numbers that are left over."""
        return frozenset(itertools.islice(heapq.merge(*self.left), most))


def dealt_numbers(saved: Sequence[PromptNumbers], *, shard: int, num_shards: int) -> PromptNumbers:
    """Returns the numbers of a data shard after their number has changed: each number that no shard has
    opened is in exactly one.

    Args:
        saved: of all former shards.
    """
    num_saved = len(saved)
    opened_by_none = max(each.own for each in saved) - num_saved + 1  # a shard's own are `num_saved` apart
    left, num_dealt = list[range](), 0
    for each in saved:
        for numbers in (*each.left, range(each.own, opened_by_none, num_saved)):
            left.append(numbers[(shard - num_dealt) % num_shards :: num_shards])
            num_dealt += len(numbers)
    return PromptNumbers(shard, num_shards, opened_by_none, tuple(filter(None, left)))


def share_of_shard(batch: int, *, shard: int, num_shards: int, first: int) -> int:
    """Returns how many of the prompt numbers ``first .. first + batch - 1`` are in this data shard."""
    start = first_number(shard, num_shards, at_least=first)
    return max(0, math.ceil((first + batch - start) / num_shards))


def sample_seed(seed: int, prompt_number: int, index: int | str, retry: int = 0) -> int:
    """Returns the seed of one completion; it does not depend on when the completion is requested."""
    return random.Random(f"sample/{seed}/{prompt_number}/{index}/{retry}").getrandbits(31)


def is_in_share(seed: int, prompt_number: int, share: float) -> bool:
    """Whether a prompt group is one of this share of all groups; the larger share has all of the smaller."""
    return sample_seed(seed, prompt_number, "share") < share * 2**31


WINDOW = 128
"""Number of later prompt groups after which an outcome's weight in the acceptance rate is about a third."""

MOST_AHEAD = 4
"""Maximum number of groups in flight per missing group: a bad estimate must not flood the engines."""

LEAST_OPENED = 48
"""Number of groups that may always be opened in an iteration; bad luck would exhaust a smaller number."""


PATIENCE = 4
"""Factor of the limit in case of bad luck. At an acceptance of 21 %, 48 groups give fewer than 3 in one of
1000 iterations."""


def opening_limit(target: int, factor: float) -> int:
    """Returns how many groups a trainer node may open in one iteration for `target` groups, at any acceptance
    rate. `Quota.most` may be higher, if the rate shows that more groups would reach the target."""
    return max(target, int(target * factor), LEAST_OPENED)


def num_extra(target: int, oversample: float) -> int:
    """Returns how many groups beyond `target` are sampled at a time. An iteration ends when `target` groups
    are complete, so about so many of its longest groups are carried over."""
    return math.ceil(round((oversample - 1.0) * target, 6))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Estimate of the share of accepted prompt groups; older outcomes have less weight."""

    accepted: float = 0.0
    resolved: float = 0.0

    def after(self, *, accepted: bool) -> "Acceptance":
        """Returns the estimate with one more outcome."""
        keep = 1.0 - 1.0 / WINDOW
        return Acceptance(self.accepted * keep + accepted, self.resolved * keep + 1.0)

    @property
    def rate(self) -> float:
        """Share of accepted groups, in (0, 1], by Laplace's rule of succession: never 0 after a bad start."""
        return (self.accepted + 1.0) / (self.resolved + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Counts one trainer node's prompt groups of one iteration. `dropped` are this iteration's only."""

    target: int
    accepted: int = 0
    dropped: int = 0
    in_flight: int = 0
    limit: int = 0
    """Number of groups that may be opened in one iteration at any acceptance rate."""

    extra: int = 0
    """Number of groups in flight beyond those that the target needs (`num_extra`)."""

    is_patient: bool = False
    """Always allow `PATIENCE` times the limit: the rate depends on what ended first, and on restarts."""

    acceptance: Acceptance = Acceptance()
    """The acceptance rate; the next iteration begins with this estimate."""

    @property
    def most(self) -> int:
        """Number of groups that may be opened in one iteration: more than the limit if twice the limit would
        reach the target at the current acceptance rate. Then the shortfall is bad luck."""
        is_bad_luck = self.is_patient or 2 * self.limit * self.acceptance.rate >= self.target
        return PATIENCE * self.limit if is_bad_luck else self.limit

    def num_to_open(self) -> int:
        """Returns how many groups to open now, so that those in flight will probably reach the target.

        The number in flight is the number of missing groups divided by the acceptance rate, and at most
        `MOST_AHEAD` per missing group; `extra` more.
        """
        missing = self.target - self.accepted
        if missing <= 0:
            return 0
        wanted = min(math.ceil(missing / self.acceptance.rate), MOST_AHEAD * missing)
        wanted += self.extra - self.in_flight
        left = self.most - self.accepted - self.dropped - self.in_flight
        return max(0, min(wanted, left))

    def is_expected_from(self, num_sampled: int) -> bool:
        """Whether `num_sampled` complete groups in flight, once scored, will probably reach the target."""
        return self.accepted + math.floor(num_sampled * self.acceptance.rate) >= self.target

    def is_exhausted(self) -> bool:
        """Whether the target can no longer be reached."""
        return self.accepted + self.in_flight < self.target and self.num_to_open() == 0

    def shortfall(self) -> str:
        """Returns the beginning of an error message about a missed target."""
        return (
            f"{self.dropped} of {self.accepted + self.dropped} prompt groups were dropped and "
            f"{self.accepted} of {self.target} accepted in this iteration: too few to go on"
        )

    def opened(self, num: int) -> "Quota":
        """Returns the quota after `num` more groups were opened."""
        return replace(self, in_flight=self.in_flight + num)

    def resolved(self, *, accepted: bool) -> "Quota":
        """Returns the quota after one group in flight was accepted or dropped."""
        return replace(
            self,
            in_flight=self.in_flight - 1,
            accepted=self.accepted + accepted,
            dropped=self.dropped + (not accepted),
            acceptance=self.acceptance.after(accepted=accepted),
        )


class InOrder:
    """Counts the accepted prompt groups below the lowest unfinished one, as groups are opened and resolved.

    Groups are opened in the order of their numbers, so the count never falls, and each group is examined only
    a few times in total.
    """

    def __init__(self, accepted: Iterable[int], unfinished: Iterable[int]) -> None:
        self._waiting, self._open = list(accepted), list(unfinished)
        heapq.heapify(self._waiting)
        heapq.heapify(self._open)
        self._resolved: set[int] = set()
        self._count = 0

    def opened(self, number: int) -> None:
        """Adds an unfinished group."""
        heapq.heappush(self._open, number)

    def resolved(self, number: int, *, accepted: bool) -> None:
        """Records that an unfinished group was accepted or dropped."""
        self._resolved.add(number)
        if accepted:
            heapq.heappush(self._waiting, number)

    def num_in_order(self) -> int:
        """Returns the number of accepted groups with no unfinished group below them."""
        while self._open and self._open[0] in self._resolved:
            self._resolved.discard(heapq.heappop(self._open))
        while self._waiting and (not self._open or self._waiting[0] < self._open[0]):
            heapq.heappop(self._waiting)
            self._count += 1
        return self._count


HANDFUL = 8
"""Number of prompt groups that fail in the user's code, before any success, after which the run ends."""


@dataclass(frozen=True, slots=True)
class Trials:
    """Detects a user's functions that never work: counts the failed groups before the first other one."""

    failed: int = 0
    has_worked: bool = False

    def after(self, *, is_users_failure: bool) -> "Trials":
        """Returns the state after one more group was resolved."""
        if self.has_worked or not is_users_failure:
            return Trials(self.failed, True)
        return Trials(self.failed + 1)

    @property
    def is_hopeless(self) -> bool:
        """Whether more groups would only repeat the failure."""
        return not self.has_worked and self.failed >= HANDFUL
