"""A launcher's steps in the run folder: while the folder fails, the launcher waits and says so.

Only what may pass is waited for (`yatt.adapters.patience`). Whatever a filesystem says is no mistake of the
user's: the exit code is 1, never 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from yatt.adapters.patience import is_passing, until_answered
from yatt.errors import FolderGone, FolderUnreachable, StoppedWaiting, YattError

T = TypeVar("T")


class _NotNow(Exception):
    """A passing error of the folder."""


@dataclass(slots=True, kw_only=True)
class FolderWait:
    """Carries out steps in one run folder.

    Attributes:
        limit_s: how long each step may wait.
        signals: received so far. One that is in `ending` ends a wait, also if it came before; a step that
            answers at once is carried out all the same.
        say: prints one line for people.
        num_heeded: so many of those signals have had their effect, and end no wait.
    """

    root: Path
    limit_s: float
    signals: list[int]
    ending: frozenset[int]
    say: Callable[[str], None]
    num_heeded: int = 0

    def __call__(self, step: Callable[[], T]) -> T:
        """The result of `step`, which may be called several times, and in another thread.

        Raises:
            FolderUnreachable: the folder failed until the limit, or failed in a way that does not pass.
            StoppedWaiting: a signal came, and the folder fails.
            YattError: any other error of the step.
        """
        results: list[T] = []
        num_told, has_waited = self._num_told(), False

        def say(error: str) -> None:
            nonlocal has_waited
            has_waited = True
            self._say_waiting(error)

        try:
            until_answered(
                lambda: results.append(_tried(step)), errors=(_NotNow,), limit_s=self.limit_s, say=say,
                is_told=lambda: self._num_told() > (self.num_heeded if has_waited else num_told),
            )  # fmt: skip
        except (_NotNow, TimeoutError, OSError) as error:
            raise FolderUnreachable(
                f"the run folder {self.root} cannot be used ({error or 'no answer'}). See that it can be "
                f"read and written from here, then `yatt resume {self.root}` goes on."
            ) from error
        if not results:
            raise StoppedWaiting(
                f"stopped by a signal while the run folder {self.root} did not answer; `yatt resume` goes on"
            )
        return results[0]

    def _num_told(self) -> int:
        return sum(number in self.ending for number in self.signals)

    def _say_waiting(self, error: str) -> None:
        self.say(
            f"the run folder {self.root} does not answer ({error}); waiting for it, up to {self.limit_s:g} s "
            "(launch.phase_timeout_s)"
        )


def _tried(step: Callable[[], T]) -> T:
    """The step's result; what a filesystem said in whatever words is told as _NotNow or OSError."""
    try:
        return step()
    except FolderGone:
        raise
    except (OSError, YattError) as error:
        if is_passing(error):
            raise _NotNow(str(error)) from error
        if isinstance(error.__cause__, OSError):
            raise OSError(str(error)) from error
        raise
