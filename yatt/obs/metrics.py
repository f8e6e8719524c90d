"""``metrics.jsonl``: one line an iteration, written by the leader once the iteration is complete.

A resumed attempt repeats iterations after its checkpoint, so it first drops their lines: the file never
has an iteration twice.
"""

import json
from pathlib import Path
from typing import Any

from yatt.adapters.files import append_line, publish

STEP = "training/global_step"
TIME_PREFIXES = ("timing_s/", "perf/", "lease/", "placement/", "goodput/", "restart/", "ckpt/")
"""Keys that two runs with the same results may differ in."""


def write_row(path: Path, row: dict[str, Any]) -> None:
    """Append one iteration's line."""
    append_line(path, json.dumps(row))


def drop_from(path: Path, step: int) -> None:
    """Keep only the lines of iterations before `step`; a torn last line goes too."""
    if path.exists():
        kept = [row for row in read_rows(path) if row[STEP] < step]
        publish(path, "".join(json.dumps(row) + "\n" for row in kept).encode())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every whole line."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def results(row: dict[str, Any]) -> dict[str, Any]:
    """What must be equal between a run and its resumed twin: everything but times and placement."""
    return {key: value for key, value in row.items() if not key.startswith(TIME_PREFIXES)}
