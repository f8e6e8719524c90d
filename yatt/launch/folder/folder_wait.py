"""Waits while the run folder does not answer, and reports it.

Only transient errors are waited for (`yatt.adapters.files.patience`). A filesystem error is never a user
error: the exit code is 1, not 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from yatt.adapters.files.patience import is_passing, until_answered
from yatt.errors import FolderGone, FolderUnreachable, StoppedWaiting, YattError

T = TypeVar("T")


class _NotNow(Exception):
    """A transient error of the folder."""


@dataclass(slots=True, kw_only=True)
class FolderWait:
    """Calls functions that use one run folder, and waits while the folder fails.

    Attributes:
        limit_s: longest wait of one call.
        signals: received so far. A signal in `ending` ends a wait, also if it came earlier; a call that
            succeeds at once is made in any case.
        say: prints one line for the user.
        num_heeded: number of signals already handled; these end no wait.
    """

    root: Path
    limit_s: float
    signals: list[int]
    ending: frozenset[int]
    say: Callable[[str], None]
    num_heeded: int = 0

    def __call__(self, step: Callable[[], T]) -> T:
        """Returns the result of `step`, which may be called several times, and in another thread.

        Raises:
            FolderUnreachable: the folder failed until the limit, or with an error that is not transient.
            StoppedWaiting: a signal came while the folder failed.
            YattError: any other error of `step`.
        """
        results: list[T] = []
        num_told, has_waited = self._num_told(), False

        def say(error: str) -> None:
            nonlocal has_waited
            has_waited = True
            self._say_waiting(error)

        try:
            until_answered(
                lambda: results.append(_tried(step)),
                errors=(_NotNow,),
                limit_s=self.limit_s,
                say=say,
                is_told=lambda: self._num_told() > (self.num_heeded if has_waited else num_told),
            )
        except (_NotNow, TimeoutError, OSError) as error:
            raise FolderUnreachable(
                f"the run folder {self.root} cannot be used ({error or 'no answer'}). Make sure that it "
                f"can be read and written on this machine, then run `yatt resume {self.root}`."
            ) from error
        if not results:
            raise StoppedWaiting(
                f"stopped by a signal while the run folder {self.root} did not answer; `yatt resume` resumes"
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
    """Returns the step's result; turns filesystem errors into _NotNow (transient) or OSError."""
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
