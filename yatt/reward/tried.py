"""What the trial of the user's functions before a start finds, one record a call."""

from dataclasses import dataclass
from typing import Literal

from yatt.config.schema import RunConfig
from yatt.records.episode import ENVIRONMENT

CALLS = "calls"
"""The trial's file: a JSON line when a function is loaded or a call begins, and one with each result."""

Shown = Literal["", "truth", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedCall:
    """The result of one sample in a call.

    Attributes:
        function: the function's key in the run file.
        shown: which completion it got: the row's ground truth, or an empty text; empty: it was being loaded.
        place: file and number of the row.
        score: None if the function says that it does not apply, or failed.
        answer: of an environment: its answer; None at the end of the episode.
        error: empty if the call succeeded.
        is_mistake: the error would come again for any completion, on any machine.
    """

    function: str
    shown: Shown
    place: str
    score: float | None = None
    answer: str | None = None
    error: str = ""
    is_mistake: bool = False


def tried_keys(config: RunConfig) -> list[str]:
    """Returns the keys of the functions that are called: those of GenRMs need their judge and are not."""
    keys = [f"rewards[{reward.name}]" for reward in config.rewards if reward.trial]
    return [*keys, *([ENVIRONMENT] if config.environment.path and config.environment.trial else [])]
