"""Files of JSON lines for users: read with tolerance, because nothing depends on any one line.

A line that is incomplete, not UTF-8, not a JSON object or longer than `MAX_LINE_BYTES` is skipped and
counted; so is a file that cannot be opened. The content of a file never raises an error. Data that a run
depends on is kept elsewhere (see `yatt.adapters.run_folder.ledger`, `yatt.checkpoint.commit.manifest`).
"""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from yatt.adapters.files.patience import is_passing
from yatt.plain_files import open_regular

Record = dict[str, Any]
T = TypeVar("T")
MAX_LINE_BYTES = 16 << 20
MOST = 1 << 63
"""Larger integers count as damage; floats cannot represent all of them."""


def accept_all(record: Record) -> Record | None:
    """Accepts every object unchanged."""
    return record


def is_number(value: Any) -> bool:
    """Whether the value is a number that arithmetic and formatting can handle."""
    return type(value) is float or (type(value) is int and abs(value) < MOST)


class Tail(Generic[T]):
    """Reads new complete lines of a growing file. Starts again if the file was rewritten.

    Args:
        accept: returns what to keep of a record, or None for an invalid one.

    Attributes:
        skipped: number of unreadable lines so far, in this file.
        has_torn_end: whether the file ended with an incomplete line at the last call.
        has_more: whether the last call stopped before the end of the file.
    """

    def __init__(self, path: Path, accept: Callable[[Record], T | None]) -> None:
        self._path, self._accept = path, accept
        self._offset, self._inode = 0, 0
        self._is_no_file = False
        self._num_skipped = 0
        self.has_torn_end = self.has_more = False

    @property
    def skipped(self) -> int:
        """Number of unreadable lines; an unreadable file counts as one."""
        return self._num_skipped + self._is_no_file

    def read(self, most_bytes: int = MOST) -> tuple[list[T], bool]:
        """Returns the new lines as records, and whether the file was rewritten.

        Args:
            most_bytes: stops after the line that reaches this number of bytes.
        """
        self.has_more = False
        try:
            with open_regular(self._path) as file:
                self._is_no_file = False
                return self._read(file, most_bytes)
        except FileNotFoundError:
            return [], False
        except OSError:
            self._is_no_file = True
            return [], False

    def _read(self, file: BinaryIO, most_bytes: int) -> tuple[list[T], bool]:
        found = os.fstat(file.fileno())
        fresh = found.st_ino != self._inode or found.st_size < self._offset
        if fresh:
            self._inode, self._offset, self._num_skipped = found.st_ino, 0, 0
        file.seek(self._offset)
        records: list[T] = []
        self.has_torn_end, end = False, self._offset + most_bytes
        for line in lines_of(file):
            if line is not None and not line.endswith(b"\n"):
                self.has_torn_end = True
                break
            self._offset = file.tell()
            record, num_bad = parsed_line(line, self._accept)
            self._num_skipped += num_bad
            records += [record] if record is not None else []
            if self._offset >= end:
                self.has_more = True
                break
        return records, fresh


def read_records(
    path: Path, accept: Callable[[Record], Record | None] = accept_all, *, may_lack: bool = True
) -> tuple[list[Record], int]:
    """Returns every readable record of a file, and the number of unreadable lines; empty for a missing file.

    Raises:
        OSError: a transient filesystem error, unless `may_lack`; the records may be written back.
    """
    records, skipped = [], 0
    try:
        with open_regular(path) as file:
            for line in lines_of(file):
                record, num_bad = parsed_line(line, accept)
                skipped += num_bad
                if record is not None:
                    records.append(record)
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        if not may_lack and is_passing(error):
            raise
        return records, skipped + 1
    return records, skipped


def last_records(path: Path, num_bytes: int) -> list[Record]:
    """Returns the readable records in a file's last `num_bytes`, in order."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        found = [parsed_line(line, accept_all)[0] for line in lines_of(file)]
        return [record for record in found if record is not None]
    return []


def parsed_line(line: bytes | None, accept: Callable[[Record], T | None]) -> tuple[T | None, int]:
    """Returns the record of one line, and 1 if any part of the line was damaged. An empty line has neither.

    A filesystem that lost its last blocks leaves NUL bytes; text after them on the line is still read.
    """
    if line is None:
        return None, 1
    text = line.strip(b"\0 \t\r\n")
    has_nul = b"\0" in line
    if not text:
        return None, int(has_nul)
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None, 1
    record = accept(found) if isinstance(found, dict) else None
    return record, int(has_nul or record is None)


def lines_of(file: BinaryIO) -> Iterator[bytes | None]:
    """Yields each line with its newline; None for a line that is too long."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield None


def make_ready(path: Path) -> str:
    """Prepares a path for appending: renames anything that is not a file, ends an incomplete last line.

    Returns:
        A message for the user about a change or an error; empty if there is none.
    """
    try:
        if not os.path.lexists(path):
            return ""
        if not stat.S_ISREG(os.lstat(path).st_mode):
            aside = next(
                p for n in range(1, 1000) if not (p := path.with_name(f"{path.name}.aside-{n}")).exists()
            )
            os.rename(path, aside)
            return f"{path} was not a file; it was renamed to {aside.name}"
        with open(path, "rb+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")
    except OSError as error:
        return f"{path} cannot be written to ({error.strerror}); the run continues without it"
    return ""
