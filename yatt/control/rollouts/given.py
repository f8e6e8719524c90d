"""Prompt groups of one controller whose completions are given: in the place of the sampler.

Groups are opened in the order of the data and are complete at once, so nothing here depends on timing, and a
checkpoint needs only the number of the next row. Where rows are left out, nodes come to be at different
numbers; if their number changes then, rows between the lowest and the highest are passed over.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial

from yatt.adapters.inputs.dataset import RowFiles, prompt_text
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.node import Node
from yatt.control.rollouts.groups.data_shard import DataShard
from yatt.control.rollouts.groups.given import given_ids
from yatt.control.rollouts.groups.groups import NodeState, PromptGroup
from yatt.core.samples.prompts import first_number
from yatt.core.samples.rewards import Shaping
from yatt.errors import ConfigError
from yatt.records import cluster as c

TOO_LONG, REFUSED = "rollout/too_long", "rollout/refused_rows"
MOST_REFUSED = 0.05
"""Share of a node's part of a batch, at least one row, that may be left out because it cannot be encoded."""

_LOG = logging.getLogger(__name__)


class GivenGroups:
    """The prompt groups of one node, from opening to training; see the class `Sampler`."""

    def __init__(self, node: Node, shard: DataShard, held_out: "HeldOutGroups") -> None:
        self._node, self.shard, self.held_out = node, shard, held_out
        self._num_shards = len(node.placement.trainer_nodes)
        self._next_number = self._base_number = node.index
        self._groups: dict[int, PromptGroup] = {}
        self._skipped = Counter[str]()
        self._is_stopped = False

    def state(self) -> NodeState:
        """Returns this controller's part of a checkpoint."""
        return NodeState(data=self.shard.fingerprint, next_number=self._base_number)

    def restore(self, state: NodeState) -> None:
        """Resumes from `state`; the next number is moved up to this node's data shard.

        Raises:
            ConfigError: the training files differ from those of `state`.
        """
        self.shard.check_fingerprint(state.data)
        self._next_number = first_number(self._node.index, self._num_shards, at_least=state.next_number)
        self._base_number = self._next_number

    def restored(self, weights: str) -> None:
        """Nothing depends on which weights this attempt has restored."""

    def saved(self, iteration: int) -> None:
        """Nothing is kept beside checkpoints."""

    def groups_of(self, numbers: set[int]) -> list[PromptGroup]:
        """Returns this node's groups of a batch."""
        return [group for number, group in sorted(self._groups.items()) if number in numbers]

    def record(self, numbers: set[int], iteration: int, advantages: dict[int, float]) -> None:
        """Nothing is recorded: what is trained on is in the data."""

    def trained(self, numbers: set[int], iteration: int) -> None:  # noqa: ARG002 (as the sampler's)
        """Drops groups that were trained on."""
        self._groups = {number: group for number, group in self._groups.items() if number not in numbers}
        self._base_number = min(self._groups, default=self._next_number)

    async def advance(self, order: c.Advance) -> None:
        """Opens groups until there are as many as the batch needs. A row that the template refuses costs
        itself, as long as there are few: the check before the start encodes only some.

        Raises:
            ConfigError: every row is too long, or many cannot be encoded.
            WorkerFailed: a row cannot be read.
        """
        self._is_stopped, skipped = False, 0
        while len(self._groups) < order.target and not self._is_stopped:
            number = self._next_number
            group = await self._opened(number, order.target)
            self._next_number += self._num_shards
            if group is not None:
                self._groups[number], skipped = group, 0
                continue
            skipped += 1
            if skipped > self.shard.num_rows:
                raise ConfigError(
                    "every row of data.train_files is longer than data.max_prompt_tokens and "
                    "rollout.max_response_tokens allow; raise them."
                )

    async def _opened(self, number: int, target: int) -> PromptGroup | None:
        """Opens a group; None, and counted, if it cannot be trained on.

        Raises:
            ConfigError: this is one of many rows in this batch that cannot be encoded.
        """
        try:
            group: PromptGroup | None = (await call_in_thread(partial(self.shard.open, number)))[0]
        except ConfigError as error:
            self._skipped[REFUSED] += 1
            if self._skipped[REFUSED] > max(1.0, MOST_REFUSED * target):
                raise
            _LOG.warning("a row is left out: %s", error)
            return None
        self._skipped[TOO_LONG] += group is None
        return group

    def advanced(self, target: int) -> c.Advanced:
        """Returns the report to the leader; resets the counters."""
        chosen = [self._groups[number] for number in sorted(self._groups)[:target]]
        counters = {name: float(number) for name, number in self._skipped.items() if number}
        self._skipped.clear()
        return c.Advanced(groups=given_facts(chosen), missing=target - len(chosen), counters=counters)

    async def break_off(self) -> None:
        """Opens no more groups."""
        self._is_stopped = True


def given_facts(groups: Sequence[PromptGroup]) -> tuple[c.GroupFact, ...]:
    """Returns metadata of groups that are not scored."""
    return tuple(group.fact({}, Shaping(max_tokens=0), 0) for group in groups)


class HeldOutGroups:
    """This node's data shard of the held-out rows; those that are too long, or refused by the template, are
    left out.

    Args:
        rows: None: the run has none.
    """

    def __init__(self, node: Node, rows: RowFiles | None, tokenizer: Tokenizer) -> None:
        self._node, self._rows, self._tokenizer = node, rows, tokenizer
        self._groups: list[PromptGroup] | None = None

    async def opened(self) -> c.Advanced:
        """Opens all groups, once.

        Raises:
            WorkerFailed: a row cannot be read.
        """
        if self._groups is None:
            self._groups = await call_in_thread(self._open)
        return c.Advanced(groups=given_facts(self._groups), missing=0)

    def groups_of(self, numbers: set[int]) -> list[PromptGroup]:
        """Returns those of these numbers that are here."""
        return [group for group in self._groups or () if group.number in numbers]

    def _open(self) -> list[PromptGroup]:
        assert self._rows is not None, "asked for where there are some"
        config, found = self._node.config, list[PromptGroup]()
        numbers = range(min(len(self._rows), config.validation.max_prompts))
        for number in numbers[self._node.index :: len(self._node.placement.trainer_nodes)]:
            row = self._rows.row(number)
            try:
                ids = given_ids(row, self._tokenizer, config)
            except ConfigError as error:
                _LOG.warning("row %d of the held-out ones is left out: %s", number + 1, error)
                continue
            if ids.fits(config):
                found.append(ids.group(number, number, prompt_text(row.prompt)))
        return found
