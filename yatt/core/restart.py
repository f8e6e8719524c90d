"""Whether to start another attempt: pure, from how the attempts so far ended."""

from dataclasses import dataclass

from yatt.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_USER_MISTAKE,
    EXIT_WILL_CONTINUE,
)

CUT_OFF_FACTOR = 3
"""So many more attempts without progress are allowed when they did not fail by themselves."""


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How one attempt ended. `committed`: the newest committed iteration at its end.

    `exit_code` None: it was cut off, by a preemption without notice or a dead node.
    """

    exit_code: int | None
    committed: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Start again, or end with `exit_code` for `reason`; `num_in_vain` attempts got no further than this."""

    again: bool
    num_in_vain: int = 0
    exit_code: int = EXIT_FAILED
    reason: str = ""


def may_begin(ends: list[AttemptEnd], *, committed: int, max_without_progress: int) -> Decision:
    """Whether a start, which need not have seen the attempts before it, should begin another.

    A crash is worth another attempt as long as attempts get further: `max_without_progress` crashes over the
    same checkpoint end the run, since the next one would crash as well. What was cut off or stopped from
    outside counts too, but much later: a job whose every time slice is shorter than its way to the next
    checkpoint would otherwise go on for ever.

    Args:
        ends: of the attempts of this submission, oldest first.
        committed: the newest committed iteration now.
    """
    crashed = stopped = 0
    for end in reversed(ends):
        if end.committed != committed or end.exit_code in (EXIT_FINISHED, EXIT_USER_MISTAKE):
            break
        crashed += end.exit_code not in (None, EXIT_WILL_CONTINUE)
        stopped += end.exit_code in (None, EXIT_WILL_CONTINUE)
    if crashed >= max_without_progress:
        reason = f"{crashed} attempts in a row failed without a checkpoint after iteration {committed}"
    elif crashed + stopped >= CUT_OFF_FACTOR * max_without_progress:
        reason = (
            f"{crashed + stopped} attempts in a row ended without a checkpoint after iteration {committed}, "
            f"{stopped} of them stopped from outside: save more often (checkpoint.save_every), or "
            "ask for more time"
        )
    else:
        return Decision(again=True, num_in_vain=crashed + stopped)
    return Decision(again=False, num_in_vain=crashed + stopped, exit_code=EXIT_DO_NOT_RESTART, reason=reason)
