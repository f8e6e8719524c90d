"""Where prompt groups come from: a data shard, and the groups that an earlier attempt has kept."""

from dataclasses import dataclass
from functools import partial

from yatt.adapters.inputs.dataset import Row
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.rollouts.groups.data_shard import DataShard
from yatt.control.rollouts.groups.groups import PromptGroup
from yatt.control.rollouts.groups.kept import KeptGroups
from yatt.control.rollouts.groups.kept_files import KeptGroup
from yatt.core.samples.prompts import PATIENCE, opening_limit
from yatt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prompt groups of one node."""

    shard: DataShard
    kept: KeptGroups

    async def open(self, number: int) -> tuple[PromptGroup | None, Row, KeptGroup | None]:
        """Returns a new group, None if its prompt is too long; its row; and the kept group to use instead.

        Raises:
            WorkerFailed: the row cannot be read.
        """
        group, row = await call_in_thread(partial(self.shard.open, number))
        return group, row, self.kept.like(group) if group is not None else None

    def check_some_fit(self, skipped: int) -> None:
        """Raises ConfigError if a whole data epoch had no prompt that is short enough.

        Args:
            skipped: number of prompts that were too long, one after the other.
        """
        if skipped > self.shard.num_rows:
            raise ConfigError(
                "every prompt of data.train_files is longer than data.max_prompt_tokens "
                f"({self.shard.max_prompt_tokens}); raise it."
            )

    async def row(self, group: PromptGroup) -> Row:
        """Returns the row of a group.

        Raises:
            WorkerFailed: it cannot be read.
        """
        row: Row = await call_in_thread(partial(self.shard.row, group.row))
        return row


def most_opened(target: int, factor: float) -> int:
    """Returns how many groups a trainer node may open in one iteration, with any luck."""
    return PATIENCE * opening_limit(target, factor)
