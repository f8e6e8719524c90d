"""The order of prompts, and how many to open: pure, and the same after every resume.

Prompts are numbered from 0 over the whole run; number i is row ``order[i % rows]`` of data epoch
``i // rows``. Owner k of N owns the numbers with ``i % N == k``.
"""

import math
import random
from dataclasses import dataclass, replace


def row_order(num_rows: int, *, seed: int, data_epoch: int, shuffle: bool) -> list[int]:
    """Rows in the order of one data epoch."""
    order = list(range(num_rows))
    if shuffle:
        random.Random(f"prompts/{seed}/{data_epoch}").shuffle(order)
    return order


def first_number(owner: int, num_owners: int, *, at_least: int) -> int:
    """The smallest prompt number of `owner` that is not below `at_least`."""
    return at_least + (owner - at_least) % num_owners


def share(batch: int, *, owner: int, num_owners: int, first: int) -> int:
    """How many of the prompt numbers ``first .. first + batch - 1`` are `owner`'s."""
    start = first_number(owner, num_owners, at_least=first)
    return max(0, math.ceil((first + batch - start) / num_owners))


def sample_seed(seed: int, prompt_number: int, index: int, retry: int = 0) -> int:
    """Seed of one completion: a function of what it is, not of when it is asked for."""
    return random.Random(f"sample/{seed}/{prompt_number}/{index}/{retry}").getrandbits(31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """One owner's prompt groups of one iteration, counted."""

    target: int
    accepted: int = 0
    dropped: int = 0
    in_flight: int = 0
    limit: int = 0
    """Most groups that may be opened in all."""

    def num_to_open(self) -> int:
        """Groups to open now, so that what is in flight will probably fill the target.

        Without dropped groups that is what is missing; with them it is divided by the acceptance
        rate seen so far (Laplace's rule of succession, so that one bad start does not flood).
        """
        missing = self.target - self.accepted
        if missing <= 0:
            return 0
        resolved = self.accepted + self.dropped
        rate = (self.accepted + 1) / (resolved + 1)
        wanted = math.ceil(missing / rate) - self.in_flight
        left = self.limit - resolved - self.in_flight
        return max(0, min(wanted, left))

    def is_exhausted(self) -> bool:
        """Whether the target cannot be met any more."""
        return self.accepted + self.in_flight < self.target and self.num_to_open() == 0

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
        )
