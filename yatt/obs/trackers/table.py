"""Samples as a table: one row per sample, every cell a text or a number."""

import json
from typing import Any

from yatt.adapters.files.lines import Record
from yatt.obs.rollouts import record_line

COLUMNS = (
    "sample",
    "group",
    "attempt",
    "data_source",
    "prompt",
    "completion",
    "ground_truth",
    "num_tokens",
    "finish_reason",
    "reward",
    "advantage",
    "scores",
    "verdicts",
)
MOST_CHARS = 16384
"""Longest text of a cell; the middle of a longer one is left out."""


def table_cells(sample: Record) -> tuple[str | float | None, ...]:
    """Returns a sample's cells in the order of `COLUMNS`; what is not a number or a text becomes JSON."""
    return tuple(_cell(sample.get(name)) for name in COLUMNS)


def _cell(value: Any) -> str | float | None:
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else _json(value)
    if len(text) <= MOST_CHARS:
        return text
    half = MOST_CHARS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


def _json(value: Any) -> str:
    return record_line(value) if isinstance(value, dict) else json.dumps(value, default=str)
