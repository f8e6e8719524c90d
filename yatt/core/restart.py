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


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How one attempt ended. `committed`: the newest committed iteration at its end."""

    exit_code: int
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
    if last.exit_code in FINAL:
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
