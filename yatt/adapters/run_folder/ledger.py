"""The attempt ledger in the run folder: starts and ends of attempts, and whether the run is finished.

``attempts/E/started.json`` is written before attempt E runs, ``ended.json`` after it; an attempt with only
the first was cut off. Every record contains its attempt number and a checksum.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.files.files import (
    make_within,
    read_or_none,
    read_record,
    sealed_record,
    unsealed_any,
    write_atomically,
)
from yatt.adapters.files.patience import with_retries
from yatt.core.attempts.claims import is_finished
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
STARTED, ENDED, STOP = "started.json", "ended.json", "stop.json"
COMMITTED = "committed.json"
"""Written by the leader after each commit and after a resume: the newest checkpoint of the attempt."""

_NUMBER = re.compile(r"[0-9]{1,18}")
"""Of an attempt. Other names are nobody's: `isdigit` is also true of digits that `int` does not read."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The ledger's records of one attempt; `ended` is empty while it runs, or if it was cut off."""

    number: int
    started: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)


def newest_attempt(paths: RunPaths) -> int:
    """Returns the highest claimed attempt number, 0 if none."""
    return max(_numbered(paths.claims), default=0)


def run_is_finished(paths: RunPaths) -> bool:
    """Whether the run is finished. A record written by a stale attempt does not count."""
    record = unsealed_any(read_or_none(paths.finished))
    return is_finished(None if record is None else int(record["attempt"]), newest_attempt(paths))


def look_whether_finished(paths: RunPaths) -> bool:
    """Like `run_is_finished`, for the launcher: an unreadable record is an error, not an absent one.

    Raises:
        OSError: the record cannot be read.
    """
    found = _record_if_there(paths.finished)
    return is_finished(int(found["attempt"]) if found else None, newest_attempt(paths))


def write_record(paths: RunPaths, attempt: int, name: str, content: dict[str, Any]) -> None:
    """Writes one record of an attempt atomically; retries for a while if the folder fails."""
    folder = paths.attempt(attempt)

    def write() -> None:
        make_within(paths.root, folder)
        write_atomically(folder / name, sealed_record(content, attempt))

    with_retries(write)


def record_of_attempt(paths: RunPaths, attempt: int, name: str) -> dict[str, Any]:
    """Returns one record of an attempt; empty if it does not exist, or if a folder is in its place."""
    path = paths.attempt(attempt) / name
    return _unless_folder(path, lambda: unsealed_any(read_or_none(path)) or {})


def started_attempts(paths: RunPaths) -> list[Attempt]:
    """Returns every attempt that has started, oldest first."""
    numbers = sorted(_numbered(paths.root / "attempts"))
    found = [
        Attempt(n, record_of_attempt(paths, n, STARTED), record_of_attempt(paths, n, ENDED)) for n in numbers
    ]
    return [attempt for attempt in found if attempt.started]


def inputs_of(attempt: Attempt) -> dict[str, str]:
    """Returns the digests of an attempt's inputs, by name; empty if they are unknown."""
    found = attempt.started.get("inputs")
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def known_commit(paths: RunPaths) -> tuple[int, int]:
    """Returns the highest committed iteration recorded in the ledger, and the attempt that recorded it.

    (0, 0) if the run folder has no record of a commit.

    Raises:
        OSError: a record exists but cannot be read; it is unknown, not absent. A folder in its place is
            skipped with a warning, because it will never become a record.
    """
    best = (0, 0)
    for number in sorted(_numbered(paths.root / "attempts")):
        for name in (COMMITTED, ENDED, STARTED):
            path = paths.attempt(number) / name
            said = _unless_folder(path, partial(_record_if_there, path))
            iteration = said.get("iteration" if name == COMMITTED else "committed")
            if type(iteration) is int:
                best = max(best, (iteration, number), key=lambda each: each[0])
    return best


def _numbered(folder: Path) -> list[int]:
    """Returns the attempts that have a name in this folder."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return [int(name) for name in names if _NUMBER.fullmatch(name)]


def _record_if_there(path: Path) -> dict[str, Any]:
    try:
        data = read_record(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return unsealed_any(data) or {}


def _unless_folder(path: Path, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of `read`; empty if a folder is in the record's place."""
    try:
        return read()
    except IsADirectoryError:
        _LOG.warning("%s should be a record, but is a folder; it is skipped", path)
        return {}
