"""Prompt files, JSONL and parquet: checked completely before a run starts, then read from disk row by row.

verl's columns are read unchanged; other names come from the config. Values keep the types of the file. No
process holds all rows in memory: a row is addressed by its position (`RowRef`), also in the reward processes.
Parquet is copied once into an Arrow file in the node's scratch folder, which is memory-mapped.
"""

import bisect
import hashlib
import json
import os
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from yatt.adapters.media import media_of
from yatt.adapters.patience import LIMIT_S, is_passing, patiently
from yatt.config.schema import DataSection
from yatt.errors import ConfigError, WorkerFailed
from yatt.records.message import MediaRef, RowRef

BATCH_ROWS = 1024
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK": "zip",
}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """The counts from a check of all files."""

    rows: int
    without_truth: int


def check_rows(files: tuple[str, ...], data: DataSection) -> RowCounts:
    """Reads every row of `files` once.

    Raises:
        ConfigError: a file is missing or unreadable, or a row cannot be used; names file and row.
    """
    rows = without_truth = 0
    for file in files:
        for raw, place in raw_rows(Path(file)):
            rows += 1
            without_truth += _row(raw, place, data).ground_truth is None
    if not rows:
        raise ConfigError(f"{', '.join(files)}: no rows. Write files with prompts in data.train_files.")
    return RowCounts(rows=rows, without_truth=without_truth)


class _Opened:
    """A file that is closed when the last thread that reads it has ended."""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)


class RowReader:
    """Reads rows by their position.

    Args:
        scratch: folder of the Arrow copies that `RowFiles` has made.
    """

    def __init__(self, files: tuple[str, ...], data: DataSection, scratch: Path) -> None:
        self._paths, self._data, self._scratch = [Path(file) for file in files], data, scratch
        self._opening = threading.Lock()  # rows are read in several threads
        self._lines: dict[int, _Opened] = {}
        self._tables: dict[int, Any] = {}

    def path(self, ref: RowRef) -> Path:
        """Returns the file of a row."""
        return self._paths[ref.file]

    def read(self, ref: RowRef, *, limit_s: float = LIMIT_S) -> Row:
        """Reads one row.

        Args:
            limit_s: time limit for retries after transient errors; 0: one try.

        Raises:
            WorkerFailed: the file cannot be read any more, or has changed.
        """
        path = self.path(ref)
        find = self._parquet_row if path.suffix == ".parquet" else self._line
        try:
            return _row(patiently(partial(find, ref), limit_s=limit_s), str(path), self._data)
        except (OSError, ValueError, ConfigError) as error:
            raise WorkerFailed(f"{path}: a row of the data file cannot be read any more: {error}") from error

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self._lines.clear()
        self._tables.clear()

    def _line(self, ref: RowRef) -> dict[str, Any]:
        file, is_new = self._opened(ref.file)
        while True:
            try:
                raw: dict[str, Any] = json.loads(os.pread(file.handle, ref.size, ref.at))
            except OSError:  # a file handle can stay stale: another thread's says nothing of a new one
                self._forget(ref.file, file)
                if is_new:
                    raise
                file, is_new = self._opened(ref.file)
            else:
                return raw

    def _opened(self, number: int) -> tuple[_Opened, bool]:
        """Returns a file, and whether this call opened it."""
        with self._opening:
            if is_new := number not in self._lines:
                self._lines[number] = _Opened(self._paths[number])
            return self._lines[number], is_new

    def _forget(self, number: int, file: _Opened) -> None:
        """Lets the next read open the file again, unless another thread has done so meanwhile."""
        with self._opening:
            if self._lines.get(number) is file:
                del self._lines[number]

    def _parquet_row(self, ref: RowRef) -> dict[str, Any]:
        import pyarrow

        with self._opening:
            if ref.file not in self._tables:
                mapped = pyarrow.memory_map(str(self._copy(ref.file)))
                self._tables[ref.file] = pyarrow.ipc.open_file(mapped)
        batch, row = divmod(ref.at, BATCH_ROWS)
        found: dict[str, Any] = self._tables[ref.file].get_batch(batch).slice(row, 1).to_pylist()[0]
        return found

    def _copy(self, file: int) -> Path:
        return self._scratch / f"{self._paths[file].stem[:40]}-{file}.arrow"


class RowFiles(RowReader):
    """The rows of data files, by their number over all files.

    Args:
        limit_s: time limit per file for retries after transient filesystem errors.

    Raises:
        ConfigError: a file is missing or unreadable.
        OSError: a transient error that lasted longer.
    """

    def __init__(
        self, files: tuple[str, ...], data: DataSection, scratch: Path, *, limit_s: float = LIMIT_S
    ) -> None:
        super().__init__(files, data, scratch)
        self._offsets: list[array[int]] = []  # of lines, and the end; empty for parquet
        counts, digests = [], []
        for number, path in enumerate(self._paths):
            if path.suffix == ".parquet":
                offsets, digest = array("Q"), patiently(partial(_digest_of, path), limit_s=limit_s)
                counts.append(patiently(partial(self._make_copy, number), limit_s=limit_s))
            else:
                offsets, digest = patiently(partial(_line_starts, path), limit_s=limit_s)
                counts.append(len(offsets) // 2)
            self._offsets.append(offsets)
            digests.append(digest)
        self._ends = list(accumulate(counts))
        self.fingerprint = hashlib.sha256(b"".join(digests)).hexdigest()
        """SHA-256 of all files in order: if it is equal, rows with the same number are the same rows."""

    def __len__(self) -> int:
        return self._ends[-1]

    def ref(self, number: int) -> RowRef:
        """Returns the position of a row."""
        file = bisect.bisect_right(self._ends, number)
        index = number - (self._ends[file - 1] if file else 0)
        offsets = self._offsets[file]
        if not offsets:
            return RowRef(file, index, 0)
        return RowRef(file, offsets[2 * index], offsets[2 * index + 1])

    def row(self, number: int) -> Row:
        """Reads one row from disk.

        Raises:
            WorkerFailed: see `read`.
        """
        return self.read(self.ref(number))

    def _make_copy(self, file: int) -> int:
        """Copies a parquet file to an Arrow file; returns its number of rows."""
        import pyarrow

        self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        rows, writer = 0, None
        path = self._copy(file)
        for batch in _parquet_batches(self._paths[file]):
            writer = writer or pyarrow.ipc.new_file(str(path), batch.schema)
            for start in range(0, len(batch), BATCH_ROWS):
                writer.write_batch(batch.slice(start, BATCH_ROWS))
            rows += len(batch)
        if writer is not None:
            writer.close()
        return rows


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


def _line_starts(path: Path) -> "tuple[array[int], bytes]":
    """Returns offset and length of every line that is not blank, in sequence; and the file's SHA-256."""
    found, at, digest = array("Q"), 0, hashlib.sha256()
    with _opened(path) as lines:
        for line in lines:
            digest.update(line)
            if not line.isspace():
                found.extend((at, len(line)))
            at += len(line)
    return found, digest.digest()


def _digest_of(path: Path) -> bytes:
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").digest()


def _opened(path: Path) -> Any:
    """Opens a data file.

    Raises:
        ConfigError: it does not exist, or cannot be read.
        OSError: a transient error, which is not a user error.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such data file. Check data.train_files and data.val_files.")
    try:
        return path.open("rb")
    except OSError as error:
        if is_passing(error):
            raise
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error


def raw_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the rows of a data file, each with its place for messages."""
    if path.suffix == ".parquet":
        rows = (raw for batch in _parquet_batches(path) for raw in batch.to_pylist())
        yield from ((raw, f"{path}: row {number}") for number, raw in enumerate(rows, start=1))
        return
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                _refuse_encodings(path, line)
            if not line.isspace():
                yield _parsed(line, f"{path}: row {number}"), f"{path}: row {number}"


def _refuse_encodings(path: Path, first: bytes) -> None:
    kind = next((name for magic, name in COMPRESSED.items() if first.startswith(magic)), "")
    if kind:
        raise ConfigError(f"{path}: is compressed ({kind}); decompress it.")
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{path}: is text in UTF-16; save it as UTF-8.")


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


def _parquet_batches(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"{path}: parquet needs pyarrow; pip install 'yatt[parquet]'.") from error
    _opened(path).close()
    try:
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=64 * BATCH_ROWS)
    except (pyarrow.ArrowException, OSError) as error:
        if is_passing(error):
            raise
        raise ConfigError(f"{path}: cannot be read as parquet: {error}.") from error


def _row(raw: dict[str, Any], place: str, data: DataSection) -> Row:
    prompt = _descend(raw, data.prompt_key)
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
    told = (("prompt", prompt_text(prompt)), ("ground truth", truth_text(truth)), ("data source", origin))
    for name, text in told:
        _refuse_surrogates(text, name, place)
    return Row(
        prompt=prompt,
        ground_truth=truth,
        data_source=origin,
        raw=raw,
        media=media_of(_descend(raw, data.media_key), place) if data.media_key else (),
    )


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
