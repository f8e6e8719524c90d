"""``metrics.jsonl``: one line per iteration, written by the leader once the iteration is complete.

A resumed attempt repeats the iterations after its checkpoint, so it first rewrites the file without their
lines: no iteration appears twice. It appends to the open file, not to the name: a stale attempt appends to
its own replaced file, which nobody reads.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from yatt.adapters.files.files import write_atomically
from yatt.adapters.files.lines import MOST, Record, is_number, read_records

STEP = "training/global_step"
CHANGED_INPUTS = "training/changed_inputs"
"""In the first row after a resume: number of inputs that are others than when its checkpoint was written."""

FAILED_SHARE = "failed_share"
"""Last part of the key of the share of held-out completions that have no score."""

TIME_PREFIXES = (
    "timing_s/",
    "timing_per_token_ms/",
    "perf/",
    "lease/",
    "placement/",
    "goodput/",
    "restart/",
    "ckpt/",
)
"""Prefixes of keys that may differ between two runs with the same results."""


_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that strict JSON does not have, by the names that Python's JSON and `metrics.jsonl` use."""


def is_validation(key: str) -> bool:
    """Whether a key is the mean score of held-out prompts; `best@N` has its own trend and is not judged."""
    return key.startswith("val-core/") and key.rpartition("/")[2].startswith("mean@")


def strict_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row for strict JSON: a number that is not finite becomes its name, not null."""
    return {key: _name(value) if isinstance(value, float) else value for key, value in row.items()}


def row_of_strict(row: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `strict_row`."""
    return {key: _NAMES.get(value, value) if isinstance(value, str) else value for key, value in row.items()}


def amount_in(row: dict[str, Any], key: str) -> float:
    """Returns the row's value for a sum: 0 if it is missing, not finite or beyond `MOST`."""
    value = row.get(key)
    return value if isinstance(value, int | float) and abs(value) < MOST else 0


def _name(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return next(name for name, each in _NAMES.items() if each == value or (each != each and value != value))


class RowFile:
    """A JSONL file that one attempt appends to.

    Args:
        keep_before: keeps the lines of iterations before this one; drops an incomplete last line.
        guard: raises StaleAttempt if a newer attempt exists; called before the file is replaced.
    """

    def __init__(self, path: Path, keep_before: int, guard: Callable[[], None]) -> None:
        self._path, self._guard = path, guard
        kept = [row for row in read_metric_rows(path) if row[STEP] < keep_before]
        self.steps = {row[STEP] for row in kept}
        """Iterations whose rows were kept."""
        guard()
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND)

    def append(self, row: dict[str, Any]) -> None:
        """Appends one line. If a stale attempt has replaced this file, it is put back.

        Raises:
            StaleAttempt: a newer attempt has replaced the file.
        """
        self._guard()
        size, line = os.fstat(self._descriptor).st_size, json.dumps(row).encode() + b"\n"
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            with contextlib.suppress(OSError):  # so that it can be retried
                os.ftruncate(self._descriptor, size)
            raise
        if not self._has_its_name():
            self._guard()
            size = os.fstat(self._descriptor).st_size
            write_atomically(self._path, os.pread(self._descriptor, size, 0))
            self.close()
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND)

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def read_metric_rows(path: Path) -> list[dict[str, Any]]:
    """Returns every readable row of an iteration; skips other lines.

    Raises:
        OSError: a transient filesystem error, which must not look like missing rows.
    """
    return read_records(path, of_iteration, may_lack=False)[0]


VALIDATIONS = ("val-core/", "val-aux/", "val/")


def validation_of(rows: Iterable[Record], iteration: int) -> Record:
    """Returns the results of an iteration's validation. A resumed run may not validate again."""
    found = (row for row in rows if row[STEP] == iteration)
    return {key: value for row in found for key, value in row.items() if key.startswith(VALIDATIONS)}


def completes_draft(row: Record, draft: Record) -> bool:
    """Whether a row of the file is the one of which a checkpoint has a draft. Rows of the file are complete.

    Args:
        draft: what the checkpoint's attempt knew of the row when it saved.
    """
    return all(
        key in row and (row[key] == value or (row[key] != row[key] and value != value))
        for key, value in draft.items()
    )


def of_iteration(record: Record) -> Record | None:
    """Returns the record if it has a valid iteration number."""
    step = record.get(STEP)
    return record if type(step) is int and 0 <= step < MOST else None


def as_row(record: Record) -> Record | None:
    """Returns the record if it is a row of metrics: every value a number or None; else None."""
    if of_iteration(record) is None:
        return None
    is_whole = all(value is None or is_number(value) for value in record.values())
    return record if is_whole else None


def comparable_results(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics that must be equal in a run and its resumed copy: all but times and placement."""
    return {key: value for key, value in row.items() if not key.startswith(TIME_PREFIXES)}
