"""Counters for metrics, by prompt group, until they are reported to the leader."""

from collections import Counter
from collections.abc import Collection, Mapping


class GroupCounters:
    """The counters of one node's prompt groups."""

    def __init__(self) -> None:
        self._by_number: dict[int, Counter[str]] = {}

    def of(self, number: int) -> "Counter[str]":
        """Returns the counters of a group, to add to."""
        return self._by_number.setdefault(number, Counter())

    def put(self, number: int, counters: Mapping[str, int]) -> None:
        """Sets the counters of a group."""
        self._by_number[number] = Counter(counters)

    def take(self, unfinished: Collection[int], last: int | None) -> "Counter[str]":
        """Returns sums over the groups that are not unfinished, and removes these.

        Args:
            last: only groups up to this number; None: all.
        """
        told = [
            number for number in self._by_number
            if number not in unfinished and (last is None or number <= last)
        ]  # fmt: skip
        return sum((self._by_number.pop(number) for number in told), Counter())

    def clear(self) -> None:
        """Removes all."""
        self._by_number.clear()
