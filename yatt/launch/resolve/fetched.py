"""The record of a data set of the hub that was fetched: which commit of it lies in which file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from yatt.adapters.files.files import read_or_none, write_atomically
from yatt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A data set's rows.

    Attributes:
        path: the file.
        entry: of the run file.
        commit: of the repository; empty for a folder.
        unasked: why the hub could not be asked for a newer commit; empty if it was asked.
    """

    path: Path
    entry: str
    commit: str
    unasked: str = ""

    def in_words(self) -> str:
        """Returns what a person is told."""
        what = f"commit {self.commit[:12]}, {self.path}" if self.commit else f"{self.path}"
        asked = f"; the hub was not asked for a newer one: {self.unasked}" if self.unasked else ""
        return what + asked


def note_fetched(stem: Path, fetched: Fetched) -> None:
    """Records what was fetched for an entry.

    Args:
        stem: path of the entry's files, without their ends.
    """
    write_atomically(stem.with_name(f"{stem.name}.json"), json.dumps(asdict(fetched), default=str).encode())


def fetched_before(stem: Path) -> Fetched | None:
    """Returns what was fetched for an entry; None if there is no record, or its file is gone."""
    data = read_or_none(stem.with_name(f"{stem.name}.json"))
    try:
        known = json.loads(data or b"{}")
        found = Fetched(
            path=stem.with_name(Path(known["path"]).name),
            entry=str(known["entry"]),
            commit=str(known["commit"]),
            unasked=str(known.get("unasked", "")),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return found if found.path.is_file() else None


def read_fetched(stem: Path) -> Fetched:
    """As `noted`, of an entry that was fetched just now.

    Raises:
        ConfigError: somebody has removed it.
    """
    found = fetched_before(stem)
    if found is None:
        raise ConfigError(f"{stem.parent}: the fetched file {stem.name} is gone; start again.")
    return found
