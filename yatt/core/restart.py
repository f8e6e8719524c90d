"""Whether to start another attempt: pure, from how the attempts so far ended."""

from dataclasses import dataclass

from yatt.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_USER_MISTAKE,
    EXIT_WILL_CONTINUE,
)

FINAL = (EXIT_FINISHED, EXIT_USER_MISTAKE, EXIT_WILL_CONTINUE, EXIT_DO_NOT_RESTART)
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
    """Start again, or end with `exit_code` for `reason`."""

    again: bool
    exit_code: int = EXIT_FAILED
    reason: str = ""


def decide(ends: list[AttemptEnd], *, max_without_progress: int) -> Decision:
    """After the last of `ends`.

    A crash is worth another attempt as long as attempts get further: `max_without_progress` crashes in
    a row over the same checkpoint end the run, since the next one would crash as well.
    """
    last = ends[-1]
    if last.exit_code is not None and last.exit_code in FINAL:
        return Decision(again=False, exit_code=last.exit_code)
    stuck = 0
    for end in reversed(ends):
        if end.exit_code in FINAL or end.committed != last.committed:
            break
        stuck += 1
    if stuck >= max_without_progress:
        reason = f"{stuck} attempts in a row ended without a checkpoint after iteration {last.committed}"
        return Decision(again=False, exit_code=EXIT_DO_NOT_RESTART, reason=reason)
    return Decision(again=True)


def may_begin(ends: list[AttemptEnd], *, committed: int, max_without_progress: int) -> Decision:
    """Whether a start of a job, which did not see the attempts before it, should begin another.

    Crashes count as in `decide`. What Slurm cut off or stopped counts too, but much later: a job whose every
    time slice is shorter than its way to the next checkpoint would otherwise go on for ever.

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
        return Decision(again=True)
    return Decision(again=False, exit_code=EXIT_DO_NOT_RESTART, reason=reason)
