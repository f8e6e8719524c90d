"""The prompt groups of one node that are not trained on yet, and what a checkpoint has of them."""

from collections.abc import ItemsView, Iterable
from functools import partial

from msgspec import structs

from yatt.adapters.inputs.dataset import Row
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.node import Node
from yatt.control.rollouts.counters import GroupCounters
from yatt.control.rollouts.groups.data_shard import DataShard, UntrainedPrompts
from yatt.control.rollouts.groups.groups import NodeState, PromptGroup, groups_due
from yatt.control.rollouts.groups.kept import KeptGroups
from yatt.control.rollouts.groups.kept_files import KeptGroup
from yatt.core.phases.kept_groups import Share
from yatt.core.samples.prompts import PATIENCE, opening_limit


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


class NodeGroups:
    """A node's groups, from opening to training.

    Args:
        shard: opens prompt groups.
        kept: those that an earlier attempt has finished.

    Attributes:
        unfinished: opened groups that are neither accepted nor dropped, by number.
        rows: of all groups that are here, by number.
        counters: of groups, for metrics.
        sampled: numbers of unfinished groups that only lack scores.
    """

    def __init__(self, node: Node, shard: DataShard, kept: KeptGroups) -> None:
        self.shard, self.kept, self._is_deterministic = shard, kept, node.config.run.deterministic
        self._prompts = UntrainedPrompts(node)
        self.accepted, self.unfinished = AcceptedGroups(), dict[int, PromptGroup]()
        self.rows: dict[int, Row] = {}
        self.counters = GroupCounters()
        self._due, self.sampled = set[int](), set[int]()  # `_due`: to complete now

    def state(self) -> NodeState:
        """Returns this node's part of a checkpoint."""
        if self._is_deterministic:
            return self.shard.state(self._prompts.untrained)
        return structs.replace(
            self.shard.state(self._prompts.unopened),
            accepted=self.accepted.every(),
            unfinished=list(self.unfinished.values()),
            counters=self.counters.every(),
        )

    def restore(self, state: NodeState) -> None:
        """Resumes from `state`.

        Raises:
            ConfigError: the training files differ from those of `state`.
        """
        self._prompts.restore(self.shard.numbers(self._prompts.unopened, state))
        self.accepted, self.counters = AcceptedGroups(state.accepted), GroupCounters(state.counters)
        self.unfinished = {group.number: group for group in state.unfinished}

    def trained(self, numbers: set[int], iteration: int) -> None:
        """Drops groups that were trained on; in deterministic mode also all later groups."""
        self.accepted.trained(numbers, iteration)
        self.counters.trained(iteration)
        self.rows = {n: row for n, row in self.rows.items() if n not in numbers}
        mine = set(filter(self._prompts.untrained.has, numbers))
        if self._is_deterministic and mine:
            self._prompts.trained(mine)
            self._prompts.restore(self._prompts.untrained)
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
        most, unopened = PATIENCE * opening_limit(target, factor), self._prompts.unopened
        share = Share(
            shard=unopened.shard,
            num_shards=unopened.num_shards,
            next_number=unopened.own,
            most=most,
            others=unopened.first_left(most) | self.unfinished.keys(),
        )
        await self.kept.begin(iteration, share)
        found = {number: self.kept.like(group) for number, group in self.unfinished.items()}
        reused = {number: self._used(kept) for number, kept in found.items() if kept is not None}
        self.unfinished.update(reused)
        return sorted(reused)

    async def open_next(self) -> tuple[int, PromptGroup | None, bool]:
        """Opens the group of the lowest number.

        Returns:
            its number; the group, None if its prompt is too long; whether an earlier attempt has kept it.

        Raises:
            WorkerFailed: its row cannot be read.
        """
        group, row = await call_in_thread(partial(self.shard.open, number := self._prompts.unopened.lowest))
        self._prompts.opened(number)
        if group is None:
            self.counters.of(number)["rollout/too_long"] += 1
            return number, None, False
        kept = self.kept.like(group)
        if kept is not None:
            group = self._used(kept)
        self.unfinished[number], self.rows[number] = group, row
        return number, group, kept is not None

    def has_kept(self) -> bool:
        """Whether an earlier attempt has kept a group that is not opened yet."""
        return self._prompts.unopened.lowest <= self.kept.last

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
            self.rows[group.number] = await call_in_thread(partial(self.shard.row, group.row))

    def resolved(self, group: PromptGroup) -> None:
        """The group is not unfinished any more."""
        self.unfinished.pop(group.number, None)
        self.sampled.discard(group.number)
