"""Prompt files, JSONL and parquet: checked completely before a run starts, then read from disk row by row.

verl's columns are read unchanged; other names come from the config. Values keep the types of the file. No
process holds all rows in memory: a row is addressed by its position (`RowRef`), also in the reward processes.
Parquet is copied once into an Arrow file in the node's scratch folder, which is memory-mapped: the
columns that the config and functions need.
"""

import bisect
import hashlib
import json
import os
import threading
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from yatt.adapters.files.patience import LIMIT_S, with_retries
from yatt.adapters.inputs.data_file import data_lines, opened_data
from yatt.adapters.inputs.data_rows import (
    Row as Row,
    config_columns,
    conversation_of as conversation_of,
    data_row,
    prompt_text as prompt_text,
    raw_rows,
    truth_text as truth_text,
)
from yatt.adapters.inputs.parquet_rows import ArrowRows, column_names, copy_to_arrow
from yatt.config.schema import DataSection
from yatt.errors import ConfigError, WorkerFailed
from yatt.records.message import RowRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """The counts from a check of all files."""

    rows: int
    without_truth: int
    equal_pairs: int = 0


def check_rows(
    files: tuple[str, ...], data: DataSection, look: Callable[[int, Row, str], None] = lambda *_: None
) -> RowCounts:
    """Reads every row of `files` once.

    Args:
        look: called with each row's number over all files, from 0, the row, and its place for messages.

    Raises:
        ConfigError: a file is missing or unreadable, or a row cannot be used; names file and row.
    """
    rows = without_truth = equal_pairs = 0
    for row, place in read_data_rows(files, data):
        look(rows, row, place)
        rows += 1
        without_truth += row.ground_truth is None
        equal_pairs += row.is_equal_pair
    if not rows:
        raise ConfigError(f"{', '.join(files)}: no rows. Write files with prompts in data.train_files.")
    return RowCounts(rows=rows, without_truth=without_truth, equal_pairs=equal_pairs)


def read_data_rows(
    files: tuple[str, ...], data: DataSection, *, is_whole: bool = False
) -> Iterator[tuple[Row, str]]:
    """Yields every row with its place, for messages.

    Args:
        is_whole: read all columns of parquet files, not only those that the config names.

    Raises:
        ConfigError: as in `check_rows`.
    """
    for file in files:
        columns = None if is_whole else _columns_to_read(Path(file), data)
        for raw, place in raw_rows(Path(file), columns):
            yield data_row(raw, place, data), place


def _columns_to_read(path: Path, data: DataSection) -> Collection[str] | None:
    """Returns the columns that the config names; all of a file without the prompt's, for the message."""
    is_lacking = path.suffix == ".parquet" and data.prompt_key.split(".", 1)[0] not in column_names(path)
    return None if is_lacking else config_columns(data)


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
        self._tables: dict[int, ArrowRows] = {}

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
            return data_row(with_retries(partial(find, ref), limit_s=limit_s), str(path), self._data)
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
        with self._opening:
            if ref.file not in self._tables:
                self._tables[ref.file] = ArrowRows(self._copy(ref.file))
        return self._tables[ref.file].row(ref.at)

    def _copy(self, file: int) -> Path:
        return self._scratch / f"{self._paths[file].stem[:40]}-{file}.arrow"


class RowFiles(RowReader):
    """The rows of data files, by their number over all files.

    Args:
        columns: those that the copies of parquet files have; None: all.
        limit_s: time limit per file for retries after transient filesystem errors.

    Raises:
        ConfigError: a file is missing or unreadable.
        OSError: a transient error that lasted longer.
    """

    def __init__(
        self,
        files: tuple[str, ...],
        data: DataSection,
        scratch: Path,
        *,
        columns: Collection[str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        super().__init__(files, data, scratch)
        self._offsets: list[array[int]] = []  # of lines, and the end; empty for parquet
        counts, digests = [], []
        for number, path in enumerate(self._paths):
            if path.suffix == ".parquet":
                offsets, digest = array("Q"), with_retries(partial(_digest_of, path), limit_s=limit_s)
                counts.append(with_retries(partial(self._make_copy, number, columns), limit_s=limit_s))
            else:
                offsets, digest = with_retries(partial(_line_starts, path), limit_s=limit_s)
                counts.append(len(offsets) // 2)
            self._offsets.append(offsets)
            digests.append(digest)
        self._ends = list(accumulate(counts))
        self.counts = tuple(counts)
        """Number of rows of each file."""

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

    def _make_copy(self, file: int, columns: Collection[str] | None) -> int:
        self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        return copy_to_arrow(self._paths[file], self._copy(file), columns)


def _line_starts(path: Path) -> "tuple[array[int], bytes]":
    """Returns offset and length of every line that is not blank, in sequence; and the file's SHA-256."""
    found, at, digest = array("Q"), 0, hashlib.sha256()
    with opened_data(path) as file:
        for line in data_lines(path, file):
            digest.update(line)
            if not line.isspace():
                found.extend((at, len(line)))
            at += len(line)
    return found, digest.digest()


def _digest_of(path: Path) -> bytes:
    with opened_data(path) as file:
        return hashlib.file_digest(file, "sha256").digest()
