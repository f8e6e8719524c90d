"""The protocol of a tracker, and what it gets to know of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from yatt.adapters.files.lines import Record
from yatt.config.load import without_secrets
from yatt.config.schema import LoggingSection, RunConfig

FACTORY = "make_tracker"
"""Name of the function of a user's file that returns its tracker."""


class Tracker(Protocol):
    """Sends a run's metrics somewhere. Its methods may take any time and may raise: a failure ends the
    follower process and never the run."""

    def log_row(self, step: int, row: Mapping[str, float]) -> None:
        """Logs one row of metrics.jsonl. Steps rise; when it returns, the row counts as logged.

        Args:
            row: numbers, which may be NaN or infinite, by their names.
        """

    def log_samples(self, step: int, samples: Sequence[Record]) -> None:
        """Logs the samples of one iteration (`logging.send_samples`), after its row."""

    def close(self) -> None:
        """Ends the logging; later calls are not made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as a tracker sees it.

    Attributes:
        id: identifies the run at the tracker, the same in every attempt; 12 hex digits.
        name: the run folder's name.
        folder: the tracker's own folder in the run folder.
        last_step: the highest step that an earlier start has logged; -1 if there is none.
        config: the complete config by section and key, without credentials.
    """

    id: str
    name: str
    folder: Path
    last_step: int
    config: Mapping[str, Any]
    logging: LoggingSection


def shown_config(config: RunConfig) -> dict[str, Any]:
    """Returns what a tracker may know of the config, by section and key."""
    return asdict(without_secrets(config))


def dotted_keys(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested config with dotted keys; items of lists have their index, as `rewards.0.path`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            value = {str(index): each for index, each in enumerate(value)}
        if isinstance(value, Mapping) and value:
            found |= dotted_keys(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
