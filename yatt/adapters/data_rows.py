"""Reads and checks the rows of prompt files, JSONL and parquet, one after the other.

verl's columns are read unchanged; other names come from the config. Values keep the types of the file.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from yatt.adapters.media import media_of
from yatt.adapters.patience import is_passing
from yatt.config.schema import DataSection
from yatt.errors import ConfigError, words_of
from yatt.plain_files import MAX_DEPTH, encoding_fault, is_deeper, open_regular
from yatt.records.message import MediaRef

BATCH_ROWS = 1024
MAX_ROW_BYTES = 64 << 20
"""Longest line of a JSONL file; a file without line ends is not read into memory."""

NO_FILE = "no such data file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt. `prompt` is text, or a list of chat messages ({role, content}).

    `ground_truth` is the value of its column, of any type; None if the row has none.
    """

    prompt: str | list[dict[str, Any]]
    ground_truth: Any
    data_source: str
    raw: dict[str, Any]
    media: tuple[MediaRef, ...] = ()


def truth_text(value: Any) -> str:
    """Returns a ground truth as text for templates: text unchanged, anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Prompt text without control tokens: a single message's content, else all messages with roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def opened_data(path: Path) -> BufferedReader:
    """Opens a data file.

    Raises:
        ConfigError: it does not exist, or cannot be read.
        OSError: a transient error, which is not a user error.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: {NO_FILE}. Check data.train_files and data.val_files.")
    try:
        return open_regular(path)
    except OSError as error:
        if is_passing(error):
            raise
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error


def data_lines(path: Path, file: BufferedReader) -> Iterator[bytes]:
    """Yields each line with its newline.

    Raises:
        ConfigError: a line is too long.
    """
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            raise ConfigError(
                f"{path}: row {number} has more than {MAX_ROW_BYTES >> 20} MiB. Write one JSON object a line."
            )
        yield line


def raw_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields every row of a file as it is there, with its place, for messages.

    Raises:
        ConfigError: the file or a row cannot be read.
        OSError: a transient error, which is not a user error.
    """
    if path.suffix == ".parquet":
        rows = (raw for batch in parquet_batches(path) for raw in _as_rows(batch, path))
        yield from ((raw, f"{path}: row {number}") for number, raw in enumerate(rows, start=1))
        return
    with opened_data(path) as file:
        for number, line in enumerate(data_lines(path, file), start=1):
            if number == 1 and (fault := encoding_fault(line)):
                raise ConfigError(f"{path}: {fault}.")
            if not line.isspace():
                yield _parsed(line, f"{path}: row {number}"), f"{path}: row {number}"


def _as_rows(batch: Any, path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, TypeError, OverflowError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{path}: a value cannot be read ({words_of(error)}). Write the file again."
        ) from error
    return rows


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        raw = json.loads(line.decode("utf-8-sig" if line.startswith(b"\xef\xbb\xbf") else "utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place} is not text in UTF-8 ({error.reason}); save the file as UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        shown = _shown(line.decode(errors="replace"))
        raise ConfigError(f"{place} is not JSON ({error.msg}): {shown}") from error
    except RecursionError as error:
        raise ConfigError(f"{place} is nested too deeply.") from error
    except ValueError as error:
        raise ConfigError(f"{place} cannot be read as JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{place} is not an object of columns: {_shown(line.decode(errors='replace'))}")
    return raw


def parquet_batches(path: Path) -> Iterator[Any]:
    """Yields the rows of a parquet file as Arrow batches of `BATCH_ROWS`; the last one may have fewer.

    Raises:
        ConfigError: it cannot be read.
        OSError: a transient error, which is not a user error.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"{path}: parquet needs pyarrow; pip install 'yatt[parquet]'.") from error
    opened_data(path).close()
    try:
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=BATCH_ROWS)
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        if is_passing(error):
            raise
        raise ConfigError(f"{path}: cannot be read as parquet: {error}.") from error


def row_of(raw: dict[str, Any], place: str, data: DataSection) -> Row:
    """Returns a row with the columns that the config names.

    Raises:
        ConfigError: a column has a value that cannot be used.
    """
    if is_deeper(raw, MAX_DEPTH):
        raise ConfigError(f"{place} is nested too deeply, more than {MAX_DEPTH} levels.")
    prompt = _descend(raw, data.prompt_key)
    if isinstance(prompt, list):
        prompt = without_nulls(prompt)
    if not (isinstance(prompt, str) or _is_chat(prompt)) or not prompt:
        what = "has no" if prompt in (None, "", []) else "has an unreadable"
        raise ConfigError(
            f"{place} {what} prompt: column '{data.prompt_key}' must be text or a list of "
            f"{{role, content}} messages, both text. The row: {_shown(json.dumps(raw, default=str))} "
            f"Correct the row, or write the column in data.prompt_key."
        )
    source = _descend(raw, data.data_source_key)
    truth = _descend(raw, data.ground_truth_key) if data.ground_truth_key else None
    origin = data.default_data_source if source is None else str(source)
    told = (("prompt", truth_text(prompt)), ("ground truth", truth_text(truth)), ("data source", origin))
    for name, text in told:
        _refuse_surrogates(text, name, place)
    return Row(
        prompt=prompt,
        ground_truth=truth,
        data_source=origin,
        raw=raw,
        media=media_of(_descend(raw, data.media_key), place) if data.media_key else (),
    )


def without_nulls(messages: list[Any]) -> list[Any]:
    """Returns messages without keys of theirs, or of their tool calls, whose value is null: parquet has every
    key in every message, and a chat template that looks whether a key is there would take them for given.
    Null among the arguments of a tool call is a value."""
    found = []
    for message in messages:
        if not isinstance(message, dict):
            return messages  # refused by whoever reads it
        message = _without_null_keys(message)
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [_without_null_keys(call) for call in calls]
        found.append(message)
    return found


def _without_null_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: each for key, each in value.items() if each is not None}


def _refuse_surrogates(text: str, name: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place}: its {name} contains a lone surrogate (at {error.start}), which no tokenizer accepts. "
            "Correct the row."
        ) from error


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in prompt
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
