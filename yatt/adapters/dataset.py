"""Prompt files: JSONL and parquet, read once, checked row by row.

verl's columns are understood as they are; other names come from the config. A file is checked whole
before a run starts, and the first bad row is named with its number and its content.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.config.schema import DataSection
from yatt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt. `prompt` is text, or a list of chat messages ({role, content})."""

    prompt: str | list[dict[str, Any]]
    ground_truth: str
    data_source: str
    raw: dict[str, Any]


def read_rows(files: tuple[str, ...], data: DataSection) -> list[Row]:
    """Every row of `files`, in order.

    Raises:
        ConfigError: a file is missing or unreadable, or a row lacks its prompt; names file and row.
    """
    rows = [_row(raw, place, data) for file in files for raw, place in _raw_rows(Path(file))]
    if not rows:
        raise ConfigError(f"{', '.join(files)}: no rows. Point data.train_files at files with prompts.")
    return rows


def _raw_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such data file. Check data.train_files and data.val_files.")
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                raw = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{path}: row {number} is not JSON ({error.msg}): {_shown(line)}"
                ) from error
            if not isinstance(raw, dict):
                raise ConfigError(f"{path}: row {number} is not an object of columns: {_shown(line)}")
            yield raw, f"{path}: row {number}"


def _parquet(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"{path}: parquet needs pyarrow; pip install 'yatt[parquet]'.") from error
    table = parquet.read_table(path)
    for number, raw in enumerate(table.to_pylist(), start=1):
        yield raw, f"{path}: row {number}"


def _row(raw: dict[str, Any], place: str, data: DataSection) -> Row:
    prompt = _descend(raw, data.prompt_key)
    if not (isinstance(prompt, str) or _is_chat(prompt)) or not prompt:
        what = "has no" if prompt in (None, "", []) else "has an unreadable"
        raise ConfigError(
            f"{place} {what} prompt: column '{data.prompt_key}' must be text or a list of "
            f"{{role, content}} messages. The row: {_shown(json.dumps(raw, default=str))} "
            f"Mend the row, or name the column in data.prompt_key."
        )
    truth = _descend(raw, data.ground_truth_key)
    source = _descend(raw, data.data_source_key)
    return Row(
        prompt=prompt,
        ground_truth="" if truth is None else str(truth),
        data_source=data.default_data_source if source is None else str(source),
        raw=raw,
    )


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(message, dict) and {"role", "content"} <= set(message) for message in prompt
    )


def _descend(raw: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(raw, dict):
            return None
        raw = raw.get(part)
    return raw


def _shown(text: str, width: int = 160) -> str:
    text = text.strip()
    return text if len(text) <= width else text[:width] + " ..."
