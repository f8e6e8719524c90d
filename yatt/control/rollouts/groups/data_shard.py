"""This controller's data shard: makes prompt groups of rows, in the run's order."""

import functools
from array import array
from collections.abc import Iterable
from dataclasses import replace

from yatt.adapters.inputs.dataset import Row, RowFiles, prompt_text
from yatt.adapters.inputs.encoded_prompt import encode_prompt
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.schema import RunConfig
from yatt.control.node import Node
from yatt.control.rollouts.groups.given import given_ids
from yatt.control.rollouts.groups.groups import NodeState, PromptGroup, new_group
from yatt.core.samples.prompts import PromptNumbers, RowSource, row_order
from yatt.errors import ConfigError
from yatt.records.message import RowRef


class UntrainedPrompts:
    """The prompts of a node that are not trained on yet, by their numbers.

    Attributes:
        unopened: those of which the node has no group yet.
        untrained: all. A checkpoint without any group begins with these.
    """

    def __init__(self, node: Node) -> None:
        self.unopened = self.untrained = PromptNumbers(node.index, len(node.placement.trainer_nodes))

    def restore(self, numbers: PromptNumbers) -> None:
        """Begins with these; the node has no group."""
        self.unopened = self.untrained = numbers

    def opened(self, number: int) -> None:
        """The lowest number was opened."""
        self.unopened = self.unopened.after(number)

    def trained(self, mine: Iterable[int]) -> None:
        """Numbers of this node were trained on."""
        self.untrained = self.untrained.after(max(mine))


class DataShard:
    """Opens prompt groups by number. Reads the disk: call it in a thread.

    Args:
        rows: every row of the training files; only this node's share is ever read.

    Raises:
        ConfigError: a data epoch has no prompt.
    """

    def __init__(self, config: RunConfig, rows: RowFiles, tokenizer: Tokenizer) -> None:
        self._config, self._rows, self._tokenizer = config, rows, tokenizer
        weights = (config.data.weights.get(file, 1.0) for file in config.data.train_files)
        self._sources = tuple(map(RowSource, rows.counts, weights))
        self._num_prompts = sum(source.num_prompts for source in self._sources)
        if not self._num_prompts:
            raise ConfigError("data.weights: with these, a data epoch has no prompt; raise them.")

    @functools.lru_cache(maxsize=2)  # noqa: B019 (one shard per process)
    def _order(self, data_epoch: int) -> "array[int]":
        section = self._config.data
        order = row_order(
            self._sources, seed=self._config.run.seed, data_epoch=data_epoch, shuffle=section.shuffle
        )
        return array("Q", order)

    @property
    def num_rows(self) -> int:
        """Number of prompts of a data epoch, over all nodes."""
        return self._num_prompts

    def check_some_fit(self, skipped: int) -> None:
        """Raises ConfigError if a whole data epoch had no prompt that is short enough.

        Args:
            skipped: number of prompts that were too long, one after the other.
        """
        if skipped > self.num_rows:
            raise ConfigError(
                "every prompt of data.train_files is longer than data.max_prompt_tokens "
                f"({self._config.data.max_prompt_tokens}); raise it."
            )

    def data_epoch(self, number: int) -> int:
        """Returns the pass over the data, from 0, to which a prompt number belongs."""
        return number // self._num_prompts

    def state(self, numbers: PromptNumbers) -> NodeState:
        """Returns a node's part of a checkpoint, without any group.

        Args:
            numbers: that the node is to open.
        """
        return NodeState(data=self.fingerprint, next_number=numbers.own, left=numbers.left)

    def numbers(self, shard: PromptNumbers, state: NodeState) -> PromptNumbers:
        """Returns the numbers that a node is to open after `state`.

        Args:
            shard: any numbers of the node's.

        Raises:
            ConfigError: the files are not those of the checkpoint.
        """
        self._check_fingerprint(state.data)
        return replace(shard, next=state.next_number, left=state.left)

    def _check_fingerprint(self, fingerprint: str) -> None:
        if fingerprint not in ("", self.fingerprint):
            raise ConfigError(
                "data.train_files: the files are not what they were when the checkpoint was written. A "
                "prompt is known by the number of its row: completions would be scored against other rows. "
                "Put the old files back; or start a new run with the new ones, from this run's checkpoint "
                "(run.from_checkpoint)."
            )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the training files, from `RowFiles`."""
        return self._rows.fingerprint

    def ref(self, index: int) -> RowRef:
        """Returns the place of a row, without reading it."""
        return self._rows.ref(index)

    def place(self, index: int) -> str:
        """Returns how messages name a row."""
        return f"{self._rows.path(self._rows.ref(index))}: row {index + 1} of all"

    def row(self, index: int) -> Row:
        """Returns one row.

        Raises:
            WorkerFailed: its file cannot be read any more.
        """
        return self._rows.row(index)

    def open_given(self, number: int) -> PromptGroup | str:
        """Returns the complete prompt group of a prompt number; or the metric that counts why the run does
        not train on its row.

        Raises:
            ConfigError: the template refuses it.
            WorkerFailed: as `row`.
        """
        index = self._index_of(number)
        row = self._rows.row(index)
        try:
            ids = given_ids(row, self._tokenizer, self._config)
        except ConfigError as error:
            path = self._rows.path(self._rows.ref(index))
            raise ConfigError(
                f"{path}: a row cannot be encoded (number {index + 1} of all): {error}"
            ) from error
        return ids.fault(self._config) or ids.group(number, index, prompt_text(row.prompt))

    def open(self, number: int) -> tuple[PromptGroup | None, Row]:
        """Returns the prompt group of a prompt number, None if its prompt is too long; and its row.

        Raises:
            WorkerFailed: as `row`.
        """
        index = self._index_of(number)
        row = self._rows.row(index)
        prompt = encode_prompt(row, self._tokenizer, self._config)
        if len(prompt.ids) > self._config.data.max_prompt_tokens:
            return None, row
        n = self._config.rollout.n
        return new_group(number, index, prompt.text, prompt.ids, n, prompt.media), row

    def _index_of(self, number: int) -> int:
        """Returns the row of a prompt number."""
        data_epoch, position = divmod(number, self._num_prompts)
        return self._order(data_epoch)[position]
