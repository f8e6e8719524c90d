"""The prompt groups of one node that are not trained on yet, and what a checkpoint has of them."""

from msgspec import structs

from yatt.adapters.inputs.dataset import Row
from yatt.control.node import Node
from yatt.control.rollouts.accepted import AcceptedGroups
from yatt.control.rollouts.counters import GroupCounters
from yatt.control.rollouts.groups.groups import NodeState, PromptGroup, groups_due
from yatt.control.rollouts.groups.kept_files import KeptGroup
from yatt.control.rollouts.groups.prompt_source import PromptSource, most_opened
from yatt.core.phases.kept_groups import Share
from yatt.core.samples.prompts import PromptNumbers


class NodeGroups:
    """A node's groups, from opening to training.

    Attributes:
        numbers: of the prompts that are not opened yet.
        unfinished: opened groups that are neither accepted nor dropped, by number.
        rows: of all groups that are here, by number.
        counters: of groups, for metrics.
        sampled: numbers of unfinished groups that only lack scores.
    """

    def __init__(self, node: Node, source: PromptSource) -> None:
        self.source, self._is_deterministic = source, node.config.run.deterministic
        self.numbers = self._untrained = PromptNumbers(node.index, len(node.placement.trainer_nodes))
        self.accepted, self.unfinished = AcceptedGroups(), dict[int, PromptGroup]()
        self.rows: dict[int, Row] = {}
        self.counters = GroupCounters()
        self._due, self.sampled = set[int](), set[int]()  # `_due`: to complete now

    def state(self) -> NodeState:
        """Returns this node's part of a checkpoint."""
        if self._is_deterministic:
            return self.source.shard.state(self._untrained)
        return structs.replace(
            self.source.shard.state(self.numbers),
            accepted=self.accepted.every(),
            unfinished=list(self.unfinished.values()),
            counters=self.counters.every(),
        )

    def restore(self, state: NodeState) -> None:
        """Resumes from `state`.

        Raises:
            ConfigError: the training files differ from those of `state`.
        """
        self.numbers = self._untrained = self.source.shard.numbers(self.numbers, state)
        self.accepted, self.counters = AcceptedGroups(state.accepted), GroupCounters(state.counters)
        self.unfinished = {group.number: group for group in state.unfinished}

    def trained(self, numbers: set[int], iteration: int) -> None:
        """Drops groups that were trained on; in deterministic mode also all later groups."""
        self.accepted.trained(numbers, iteration)
        self.counters.trained(iteration)
        self.rows = {n: row for n, row in self.rows.items() if n not in numbers}
        mine = set(filter(self._untrained.has, numbers))
        if self._is_deterministic and mine:
            self.numbers = self._untrained = self._untrained.after(max(mine))
            self.accepted, self.unfinished, self.rows = AcceptedGroups(), {}, {}
            self.counters.clear()

    def begin_iteration(self, oldest: int, now: int) -> list[PromptGroup]:
        """Restarts completions that are too old to be trained on; returns their groups.

        Args:
            oldest: the lowest policy version that may be trained on; `now`: the present one.
        """
        restarted = []
        for number, group in [*self.accepted.waiting(), *self.unfinished.items()]:
            if group.restart_older(oldest, now):
                self.counters.of(number)["rollout/restarted_groups"] += 1
                self.accepted.remove(number)
                self.unfinished[number] = group
                restarted.append(group)
        self.sampled = {n for n, group in self.unfinished.items() if group.is_sampled()}
        self._due = groups_due(self.unfinished, now, now - oldest)
        return restarted

    def are_due(self, waits: set[int]) -> bool:
        """Whether groups have to be completed now, without those that wait."""
        return bool((self._due & self.unfinished.keys()) - waits)

    async def use_kept(self, iteration: int, target: int, factor: float) -> list[int]:
        """Looks for groups that earlier attempts kept; those of unfinished prompts replace them at once.

        Returns:
            the numbers of those that were replaced, in rising order.
        """
        most = most_opened(target, factor)
        share = Share(
            shard=self.numbers.shard,
            num_shards=self.numbers.num_shards,
            next_number=self.numbers.own,
            most=most,
            others=self.numbers.first_left(most) | self.unfinished.keys(),
        )
        await self.source.kept.begin(iteration, share)
        found = {number: self.source.kept.like(group) for number, group in self.unfinished.items()}
        reused = {number: self._used(kept) for number, kept in found.items() if kept is not None}
        self.unfinished.update(reused)
        return sorted(reused)

    async def open_next(self) -> tuple[int, PromptGroup | None, bool]:
        """Opens the group of the lowest number.

        Returns:
            its number; the group, None if its prompt is too long; whether an earlier attempt has kept it.
        """
        group, row, kept = await self.source.open(number := self.numbers.lowest)
        self.numbers = self.numbers.after(number)
        if group is None:
            self.counters.of(number)["rollout/too_long"] += 1
            return number, None, False
        if kept is not None:
            group = self._used(kept)
        self.unfinished[number], self.rows[number] = group, row
        return number, group, kept is not None

    def has_kept(self) -> bool:
        """Whether an earlier attempt has kept a group that is not opened yet."""
        return self.numbers.lowest <= self.source.kept.last

    def _used(self, kept: KeptGroup) -> PromptGroup:
        """Returns the group, with its counters as if it had been sampled here."""
        self.counters.put(kept.group.number, kept.counters)
        return kept.group

    async def find_row(self, group: PromptGroup) -> None:
        """Reads the row of a group that was carried over from an earlier attempt.

        Raises:
            WorkerFailed: it cannot be read.
        """
        if group.number not in self.rows:
            self.rows[group.number] = await self.source.row(group)

    def resolved(self, group: PromptGroup) -> None:
        """The group is not unfinished any more."""
        self.unfinished.pop(group.number, None)
        self.sampled.discard(group.number)
