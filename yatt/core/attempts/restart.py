"""Decides whether to start another attempt, from how the previous ones ended. Pure."""

from dataclasses import dataclass

from yatt.core.requests.first_use import error_likeness, is_lasting
from yatt.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_USER_MISTAKE,
    EXIT_WILL_CONTINUE,
)

CUT_OFF_FACTOR = 3
"""Factor for the allowed attempts without progress if they were cut off or stopped from outside."""


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How one attempt ended. `committed`: the newest committed iteration at its end.

    `exit_code` is None if it was cut off, by a preemption without notice or a dead node.
    """

    exit_code: int | None
    committed: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Start again, or end with `exit_code` because of `reason`; `num_in_vain`: attempts without progress."""

    again: bool
    num_in_vain: int = 0
    exit_code: int = EXIT_FAILED
    reason: str = ""


def may_begin(ends: list[AttemptEnd], *, committed: int, max_without_progress: int) -> Decision:
    """Returns whether to begin another attempt; the caller need not have run the previous ones.

    After a crash, another attempt begins as long as attempts make progress: `max_without_progress` crashes
    over the same checkpoint end the run, because the next one would crash as well. Attempts that were cut off
    or stopped count too, with a higher limit: otherwise a job whose time limit is too short for the next
    checkpoint would restart forever.

    Two attempts in a row that ended with the same exception about what was asked for are enough.

    Args:
        ends: ends of the attempts of this submission, oldest first.
        committed: the newest committed iteration now.
    """
    crashed = stopped = 0
    for end in reversed(ends):
        if end.committed != committed or end.exit_code in (EXIT_FINISHED, EXIT_USER_MISTAKE):
            break
        crashed += end.exit_code not in (None, EXIT_WILL_CONTINUE)
        stopped += end.exit_code in (None, EXIT_WILL_CONTINUE)
    if crashed > 1 and _is_same_mistake(ends[-2:]):
        reason = f"2 attempts in a row failed alike without a checkpoint after iteration {committed}"
    elif crashed >= max_without_progress:
        reason = f"{crashed} attempts in a row failed without a checkpoint after iteration {committed}"
    elif crashed + stopped >= CUT_OFF_FACTOR * max_without_progress:
        reason = (
            f"{crashed + stopped} attempts in a row ended without a checkpoint after iteration {committed}, "
            f"{stopped} of them stopped from outside: save more often (checkpoint.save_every, "
            "save_every_minutes), or ask for more time"
        )
    else:
        return Decision(again=True, num_in_vain=crashed + stopped)
    return Decision(again=False, num_in_vain=crashed + stopped, exit_code=EXIT_DO_NOT_RESTART, reason=reason)


def _is_same_mistake(ends: list[AttemptEnd]) -> bool:
    """Whether attempts ended with equal exceptions that other nodes would raise too."""
    texts = {error_likeness(end.reason) for end in ends}
    crashed = all(end.exit_code not in (None, EXIT_WILL_CONTINUE) for end in ends)
    return crashed and len(texts) == 1 and is_lasting(ends[-1].reason)
