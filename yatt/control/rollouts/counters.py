"""Counters for metrics, by prompt group, until the iteration that reports them is trained on."""

from collections import Counter
from collections.abc import Collection, Mapping

Counts = dict[int, dict[str, int]]
"""Counters by number of the prompt group."""


class GroupCounters:
    """The counters of one node's prompt groups.

    Those that were reported to the leader are kept until their iteration is trained on: a checkpoint before
    that does not have them in a row of metrics.

    Args:
        counts: what a checkpoint has, to report again.
    """

    def __init__(self, counts: Mapping[int, Mapping[str, int]] | None = None) -> None:
        self._by_number = {number: Counter(counters) for number, counters in (counts or {}).items()}
        self._reported: dict[int, dict[int, Counter[str]]] = {}  # by iteration, by number

    def of(self, number: int) -> "Counter[str]":
        """Returns the counters of a group that are not reported yet, to add to."""
        return self._by_number.setdefault(number, Counter())

    def every(self) -> Counts:
        """Returns all counters, reported or not: those that a checkpoint has."""
        numbers = sorted({*self._by_number, *(n for told in self._reported.values() for n in told)})
        return {number: dict(counters) for number in numbers if (counters := self.whole(number))}

    def whole(self, number: int) -> "Counter[str]":
        """Returns a group's counters, reported or not."""
        return self._by_number.get(number, Counter()) + self._told(number)

    def put(self, number: int, counters: Mapping[str, int]) -> None:
        """Sets a group's counters. What is reported of them is not reported again."""
        self._by_number[number] = Counter(counters) - self._told(number)

    def take(self, iteration: int, unfinished: Collection[int], last: int | None) -> dict[str, float]:
        """Returns sums over the groups that are not unfinished, to be reported with a batch.

        Args:
            iteration: of the batch.
            last: only groups up to this number; None: all.
        """
        told = [
            number
            for number in self._by_number
            if number not in unfinished and (last is None or number <= last)
        ]
        taken = {number: self._by_number.pop(number) for number in told}
        reported = self._reported.setdefault(iteration, {})
        for number, counters in taken.items():
            reported[number] = reported.get(number, Counter()) + counters
        return {name: float(count) for name, count in sum(taken.values(), Counter[str]()).items()}

    def trained(self, iteration: int) -> None:
        """Removes what was reported up to this iteration."""
        self._reported = {i: told for i, told in self._reported.items() if i > iteration}

    def clear(self) -> None:
        """Removes all that is not reported."""
        self._by_number.clear()

    def _told(self, number: int) -> "Counter[str]":
        return sum((told[number] for told in self._reported.values() if number in told), Counter())
