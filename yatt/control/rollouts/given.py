"""Prompt groups of one controller whose completions are given: in the place of the sampler.

Groups are opened in the order of the data and are complete at once, so nothing here depends on timing, and a
checkpoint needs only the numbers that are to be opened.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from yatt.adapters.inputs.dataset import RowFiles, prompt_text
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.node import Node
from yatt.control.rollouts.groups.data_shard import DataShard, UntrainedPrompts
from yatt.control.rollouts.groups.given import given_ids
from yatt.control.rollouts.groups.groups import NodeState, PromptGroup
from yatt.core.samples.rewards import Shaping
from yatt.errors import ConfigError
from yatt.records import cluster as c

REFUSED = "rollout/refused_rows"
MOST_REFUSED = 0.05
"""Share of a node's part of a batch, at least one row, that may be left out because it cannot be encoded."""

_LOG = logging.getLogger(__name__)


class GivenGroups:
    """The prompt groups of one node, from opening to training; see the class `Sampler`."""

    def __init__(self, node: Node, shard: DataShard, held_out: "HeldOutGroups") -> None:
        self._node, self.shard, self.held_out = node, shard, held_out
        self._prompts = UntrainedPrompts(node)
        self._groups: dict[int, PromptGroup] = {}
        self._skipped = Counter[str]()
        self._is_stopped = False

    def state(self) -> NodeState:
        """Returns this controller's part of a checkpoint."""
        return self.shard.state(self._prompts.untrained)

    def restore(self, state: NodeState) -> None:
        """Resumes from `state`.

        Raises:
            ConfigError: the training files differ from those of `state`.
        """
        self._prompts.restore(self.shard.numbers(self._prompts.unopened, state))

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
        if mine := self._groups.keys() & numbers:
            self._prompts.trained(mine)
        self._groups = {number: group for number, group in self._groups.items() if number not in numbers}

    async def advance(self, order: c.Advance) -> None:
        """Opens groups until there are as many as the batch needs. A row that the template refuses costs
        itself, as long as there are few: the check before the start encodes only some.

        Raises:
            ConfigError: no row can be trained on, or many cannot be encoded.
            WorkerFailed: a row cannot be read.
        """
        self._is_stopped, skipped = False, 0
        while len(self._groups) < order.target and not self._is_stopped:
            number = self._prompts.unopened.lowest
            group = await self._opened(number, order.target)
            self._prompts.opened(number)
            if group is not None:
                self._groups[number], skipped = group, 0
                continue
            skipped += 1
            if skipped > self.shard.num_rows:
                raise ConfigError(self._nothing_fits())

    def _nothing_fits(self) -> str:
        faults = (
            "is longer than data.max_prompt_tokens and rollout.max_response_tokens allow, or a pair of equals"
        )
        cure = "raise them, or correct the rows."
        numbers = self._prompts.unopened
        shared = math.gcd(self.shard.num_rows, numbers.num_shards)
        if self._node.config.data.shuffle or shared == 1:
            return f"every row of data.train_files {faults}; {cure}"
        own = f"row {numbers.shard % shared + 1} of every {shared} in each pass"
        return (
            f"data.shuffle is false, so this node has {own}, and each of them {faults}. "
            f"Write data.shuffle: true; or {cure}"
        )

    async def _opened(self, number: int, target: int) -> PromptGroup | None:
        """Opens a group; None, and counted, if it cannot be trained on.

        Raises:
            ConfigError: this is one of many rows in this batch that cannot be encoded.
        """
        try:
            opened: PromptGroup | str = await call_in_thread(partial(self.shard.open_given, number))
        except ConfigError as error:
            self._skipped[REFUSED] += 1
            if self._skipped[REFUSED] > max(1.0, MOST_REFUSED * target):
                raise
            _LOG.warning("a row is left out: %s", error)
            return None
        if isinstance(opened, str):
            self._skipped[opened] += 1
            return None
        return opened

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
            if not ids.fault(config):
                found.append(ids.group(number, number, prompt_text(row.prompt)))
        return found
