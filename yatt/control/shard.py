"""This controller's stripe of the prompts: rows to prompt groups, in the run's order."""

import functools

from yatt.adapters.dataset import Row
from yatt.adapters.tokenizer import Tokenizer
from yatt.config.schema import RunConfig
from yatt.control.groups import PromptGroup, SampleState
from yatt.core.prompts import row_order


class DataShard:
    """Opens prompt groups by number.

    Args:
        rows: every row of the training files; only this node's stripe is ever tokenised.
    """

    def __init__(self, config: RunConfig, rows: list[Row], tokenizer: Tokenizer) -> None:
        self._config, self._rows, self._tokenizer = config, rows, tokenizer

    @functools.lru_cache(maxsize=2)  # noqa: B019 (one shard a process)
    def _order(self, data_epoch: int) -> list[int]:
        return row_order(
            len(self._rows),
            seed=self._config.run.seed,
            data_epoch=data_epoch,
            shuffle=self._config.data.shuffle,
        )

    @property
    def num_rows(self) -> int:
        """Rows of a data epoch, of all nodes together."""
        return len(self._rows)

    def row(self, index: int) -> Row:
        """One row."""
        return self._rows[index]

    def open(self, number: int) -> PromptGroup | None:
        """The prompt group of a prompt number, or None if its prompt is too long."""
        data_epoch, position = divmod(number, len(self._rows))
        index = self._order(data_epoch)[position]
        text, ids = encode_prompt(self._rows[index], self._tokenizer, self._config)
        if len(ids) > self._config.data.max_prompt_tokens:
            return None
        return new_group(number, index, text, ids, self._config.rollout.n)


def encode_prompt(row: Row, tokenizer: Tokenizer, config: RunConfig) -> tuple[str, list[int]]:
    """Text and token ids of a row's prompt; chat messages go through the model's template."""
    if isinstance(row.prompt, str):
        return row.prompt, tokenizer.encode(row.prompt)
    if not config.data.apply_chat_template:
        text = "\n".join(str(message["content"]) for message in row.prompt)
        return text, tokenizer.encode(text)
    text = tokenizer.render_chat(row.prompt)
    return text, tokenizer.encode_rendered(text)


def new_group(number: int, row: int, text: str, ids: list[int], n: int) -> PromptGroup:
    """A prompt group with nothing sampled yet."""
    samples = [SampleState(index=index) for index in range(n)]
    return PromptGroup(number=number, row=row, prompt_text=text, prompt_ids=ids, samples=samples)
