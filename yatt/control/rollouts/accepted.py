"""Prompt groups that may be trained on, from their acceptance until their iteration is done."""

from collections.abc import ItemsView, Iterable

from yatt.control.rollouts.groups.groups import PromptGroup


class AcceptedGroups:
    """The accepted groups of one controller.

    Groups *wait* until they are reported as part of a batch. If the next batch is begun before that one is
    trained on (`rollout.ahead`), they are *taken*, so that they count for no other batch.
    """

    def __init__(self, groups: Iterable[PromptGroup] = ()) -> None:
        self._waiting = {group.number: group for group in groups}
        self._taken: dict[int, PromptGroup] = {}
        self._iteration = 0  # of the batch that was reported last
        self._reported: list[int] = []  # its groups, unless it was trained on

    def __len__(self) -> int:
        """Number of groups that wait."""
        return len(self._waiting)

    def waiting(self) -> ItemsView[int, PromptGroup]:
        """Returns the groups that wait, with their numbers."""
        return self._waiting.items()

    def every(self) -> list[PromptGroup]:
        """Returns all groups, by number."""
        both = self._taken | self._waiting
        return [both[number] for number in sorted(both)]

    def of(self, numbers: set[int]) -> list[PromptGroup]:
        """Returns the groups with these numbers that are here, by number."""
        return [group for group in self.every() if group.number in numbers]

    def add(self, group: PromptGroup) -> None:
        """Adds an accepted group, without its texts: tokens are decoded again when they are shown."""
        for sample in group.samples:
            sample.text = ""
        self._waiting[group.number] = group

    def remove(self, number: int) -> None:
        """Removes a group, if it is here; it is in no batch any more."""
        self._waiting.pop(number, None)
        self._taken.pop(number, None)

    def report(self, iteration: int, target: int) -> list[PromptGroup]:
        """Returns the batch of an iteration: the lowest numbers, at most `target`."""
        self._iteration, self._reported = iteration, sorted(self._waiting)[:target]
        return [self._waiting[number] for number in self._reported]

    def take_reported(self) -> None:
        """Takes the groups of the batch that was reported last, unless it was trained on."""
        reported = [number for number in self._reported if number in self._waiting]
        self._taken |= {number: self._waiting.pop(number) for number in reported}
        self._reported = []

    def trained(self, numbers: set[int], iteration: int) -> None:
        """Removes groups that were trained on."""
        self._waiting = {n: group for n, group in self._waiting.items() if n not in numbers}
        self._taken = {n: group for n, group in self._taken.items() if n not in numbers}
        if self._iteration == iteration:
            self._reported = []
