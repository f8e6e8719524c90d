"""The attempt ledger in the run folder: who started, what came of it, whether the run is over.

``attempts/E/started.json`` is written before anything of attempt E runs, ``ended.json`` after it; an
attempt with only the first was cut off. Every record carries its attempt and a checksum.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.files import make_within, publish, read_or_none, sealed, unsealed_any
from yatt.adapters.patience import patiently
from yatt.core.claims import is_finished
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
STARTED, ENDED, STOP = "started.json", "ended.json", "stop.json"
COMMITTED = "committed.json"
"""Written by the leader after each commit, and after it resumed: the newest checkpoint of the attempt."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt as its ledger has it; `ended` is empty while it runs, or if it was cut off."""

    number: int
    started: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)


def newest_attempt(paths: RunPaths) -> int:
    """Highest attempt that was claimed, 0 if none."""
    if not paths.claims.is_dir():
        return 0
    return max((int(p.name) for p in paths.claims.iterdir() if p.name.isdigit()), default=0)


def run_is_finished(paths: RunPaths) -> bool:
    """Whether the run is over. A note that a stale attempt left does not count."""
    record = unsealed_any(read_or_none(paths.finished))
    return is_finished(None if record is None else int(record["attempt"]), newest_attempt(paths))


def look_whether_finished(paths: RunPaths) -> bool:
    """`run_is_finished` for who would start another attempt: a note that cannot be read is not an absent one.

    Raises:
        OSError: the folder does not say.
    """
    found = _record_if_there(paths.finished)
    return is_finished(int(found["attempt"]) if found else None, newest_attempt(paths))


def note(paths: RunPaths, attempt: int, name: str, content: dict[str, Any]) -> None:
    """Write one record of an attempt, whole; again and again for a while if the folder is in trouble."""
    folder = paths.attempt(attempt)

    def write() -> None:
        make_within(paths.root, folder)
        publish(folder / name, sealed(content, attempt))

    patiently(write)


def record(paths: RunPaths, attempt: int, name: str) -> dict[str, Any]:
    """One record of an attempt, empty if it is not there, or if a folder is in its place."""
    path = paths.attempt(attempt) / name
    return _unless_folder(path, lambda: unsealed_any(read_or_none(path)) or {})


def attempts(paths: RunPaths) -> list[Attempt]:
    """Every attempt that began, oldest first."""
    folder = paths.root / "attempts"
    numbers = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []
    found = [Attempt(n, record(paths, n, STARTED), record(paths, n, ENDED)) for n in numbers]
    return [attempt for attempt in found if attempt.started]


def known_commit(paths: RunPaths) -> tuple[int, int]:
    """The highest iteration that the ledger says was committed, and the attempt whose record says so.

    (0, 0) if no checkpoint was ever committed, as far as the run folder knows.

    Raises:
        OSError: a record is there and cannot be read; it counts as unknown, not as absent. A folder in its
            place is no record, and will not become one: it is passed over with a warning.
    """
    folder, best = paths.root / "attempts", (0, 0)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        for name in (COMMITTED, ENDED, STARTED) if path.name.isdigit() else ():
            said = _unless_folder(path / name, partial(_record_if_there, path / name))
            iteration = int(said.get("iteration" if name == COMMITTED else "committed", 0))
            best = max(best, (iteration, int(path.name)), key=lambda each: each[0])
    return best


def _record_if_there(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return unsealed_any(data) or {}


def _unless_folder(path: Path, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `read` gives; empty if a folder is where a record should be, which no waiting makes readable."""
    try:
        return read()
    except IsADirectoryError:
        _LOG.warning("%s is a folder, where a record should be; it is passed over", path)
        return {}
