"""The rows of metrics that a view has read, also from a file that was written anew."""

from dataclasses import dataclass, field
from typing import Any

from yatt.core.drop_counters import DROPPED_GROUPS, FAILED_GROUPS
from yatt.obs.metrics import STEP, amount

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
    _steps: set[int] = field(default_factory=set)
    """Iterations of all rows of the file."""

    _shown: dict[int, Row] = field(default_factory=dict)
    """Rows of the file before it was written anew: a resume writes the row of its checkpoint once more."""

    def take(self, rows: list[Row], *, is_fresh: bool) -> list[Row]:
        """Takes rows that were read; returns those that are new.

        Args:
            is_fresh: the file was written anew, and these are its rows from the beginning.
        """
        known = self._steps
        if is_fresh:
            self._shown = {row[STEP]: row for row in self.rows} or self._shown
            self.rows, self._steps, self.num_dropped = [], set(), 0.0
        new = [row for row in rows if row[STEP] not in known and row != self._shown.get(row[STEP])]
        self.rows += rows
        self._steps |= {row[STEP] for row in rows}
        self.num_dropped += sum(amount(row, key) for row in rows for key in (DROPPED_GROUPS, FAILED_GROUPS))
        if self.most_rows:
            del self.rows[: -self.most_rows]
        return new
