"""``metrics.jsonl``: one line an iteration, written by the leader once the iteration is complete.

A resumed attempt repeats iterations after its checkpoint, so it first writes the file anew without their
lines: the file never has an iteration twice. It then appends to the file it made, not to the name: a stale
attempt still appends to the file that it made itself, which has no name any more.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from yatt.adapters.files import publish
from yatt.adapters.lines import MOST, Record, is_number, read_records

STEP = "training/global_step"
TIME_PREFIXES = ("timing_s/", "perf/", "lease/", "placement/", "goodput/", "restart/", "ckpt/")
"""Keys that two runs with the same results may differ in."""


_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""What strict JSON has no number for: the names that Python's JSON, and so `metrics.jsonl`, has for them."""


def named(row: dict[str, Any]) -> dict[str, Any]:
    """The row for strict JSON: a number that is not finite becomes its name; null would hide what it was."""
    return {key: _name(value) if isinstance(value, float) else value for key, value in row.items()}


def unnamed(row: dict[str, Any]) -> dict[str, Any]:
    """The row that `named` was given."""
    return {key: _NAMES.get(value, value) if isinstance(value, str) else value for key, value in row.items()}


def amount(row: dict[str, Any], key: str) -> float:
    """The row's value for adding up: 0 if it has none, or one that is not finite or beyond `MOST`."""
    value = row.get(key)
    return value if isinstance(value, int | float) and abs(value) < MOST else 0


def _name(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return next(name for name, each in _NAMES.items() if each == value or (each != each and value != value))


class RowFile:
    """One attempt's hold of a JSONL file.

    Args:
        keep_before: only the lines of iterations before this one are kept; a torn last line goes too.
        guard: raises StaleAttempt if a newer attempt exists; asked before the name is taken.
    """

    def __init__(self, path: Path, keep_before: int, guard: Callable[[], None]) -> None:
        self._path, self._guard = path, guard
        kept = [row for row in read_rows(path) if row[STEP] < keep_before]
        self.steps = {row[STEP] for row in kept}
        """Iterations whose rows were kept."""
        guard()
        publish(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND)

    def append(self, row: dict[str, Any]) -> None:
        """Add one line. If a stale attempt has put its file in the place of this one, this one is put back.

        Raises:
            StaleAttempt: a newer attempt has taken the name.
        """
        self._guard()
        size, line = os.fstat(self._descriptor).st_size, json.dumps(row).encode() + b"\n"
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            with contextlib.suppress(OSError):  # so that it can be tried again
                os.ftruncate(self._descriptor, size)
            raise
        if not self._has_its_name():
            self._guard()
            size = os.fstat(self._descriptor).st_size
            publish(self._path, os.pread(self._descriptor, size, 0))
            self.close()
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND)

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every readable row of an iteration; what is no row is left out.

    Raises:
        OSError: a passing trouble of the filesystem, or rows would be taken for lost.
    """
    return read_records(path, of_iteration, may_lack=False)[0]


def of_iteration(record: Record) -> Record | None:
    """The record if it says of which iteration it is."""
    step = record.get(STEP)
    return record if type(step) is int and 0 <= step < MOST else None


def as_row(record: Record) -> Record | None:
    """A row of metrics as readers can use it: every value a number or None. None if it is no such row."""
    if of_iteration(record) is None:
        return None
    is_whole = all(value is None or is_number(value) for value in record.values())
    return record if is_whole else None


def results(row: dict[str, Any]) -> dict[str, Any]:
    """What must be equal between a run and its resumed twin: everything but times and placement."""
    return {key: value for key, value in row.items() if not key.startswith(TIME_PREFIXES)}
