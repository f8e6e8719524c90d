"""The rows of metrics that a view has read, also from a file that was written anew."""

import json
from dataclasses import dataclass, field
from typing import Any

from yatt.core.figures.drop_counters import DROPPED_GROUPS, FAILED_GROUPS
from yatt.obs.metrics import STEP, amount_in

Row = dict[str, Any]


@dataclass(slots=True)
class RowsSeen:
    """Rows of the file as it is now, oldest first.

    Attributes:
        most_rows: how many of the newest rows are kept, for a process that lives as long as the run; 0: all.
        num_dropped: number of dropped prompt groups in all rows.
    """

    most_rows: int = 0
    rows: list[Row] = field(default_factory=list)
    num_dropped: float = 0.0
    _seen: dict[int, int] = field(default_factory=dict)
    """A number for the content of the newest row of each iteration of the file."""

    _shown: dict[int, int] = field(default_factory=dict)
    """The same of the file before it was written anew: a resume writes its checkpoint's row once more."""

    def take(self, rows: list[Row], *, is_fresh: bool) -> list[Row]:
        """Takes rows that were read; returns those that are new.

        Args:
            is_fresh: the file was written anew, and these are its rows from the beginning.
        """
        known = self._seen
        if is_fresh:
            self._shown = self._seen or self._shown
            self.rows, self._seen, self.num_dropped = [], {}, 0.0
        numbers = [hash(json.dumps(row, sort_keys=True)) for row in rows]
        both = list(zip(rows, numbers, strict=True))
        new = [row for row, number in both if row[STEP] not in known and number != self._shown.get(row[STEP])]
        self.rows += rows
        self._seen.update((row[STEP], number) for row, number in both)
        self.num_dropped += sum(
            amount_in(row, key) for row in rows for key in (DROPPED_GROUPS, FAILED_GROUPS)
        )
        if self.most_rows:
            del self.rows[: -self.most_rows]
        return new
