"""All exceptions that yatt raises on purpose, who has to act on each one, and their exit codes.

YattError
|- ConfigError        the user: a file, an argument, a model or a dataset is wrong
|- WorkerFailed       the controller: a trainer rank, engine or reward process ended or failed
|  |- Excluded        nobody: the leader continues without this controller
|- LeaseLost          the controller: this process may no longer use the GPUs that it had
|- DeadlineExceeded   the operator: a request was not answered in time
|- StaleAttempt       nobody: a newer attempt of this run exists; this one ends itself
|- FolderGone         the operator: the run folder was removed during the run
|- FolderUnreachable  nobody: the run folder did not answer between two attempts
|- StoppedWaiting     nobody: a signal ended a wait for the run folder
|- SyncMismatch       a programmer: engine and trainer differ for the same weights
|- CheckpointError    the operator: a checkpoint is torn, missing or of another run
|- NoCheckpointLeft   the operator: checkpoints were committed, and none of them can be restored
|- StoreTakenOver     nobody: another folder of the same run.id has the checkpoint store now
|- StoreUnreachable   nobody: the checkpoint store did not answer; its checkpoints may be intact
   |- CheckpointsMissing the operator: the ledger has commits and the store has none; is it mounted?
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
EXIT_BELOW = 3
"""Of `yatt judge` only: what was measured is worse than was asked for."""

EXIT_WILL_CONTINUE = 75
EXIT_EXCLUDED = 76
"""Of a controller only: the run continues without this process of it."""

EXIT_DO_NOT_RESTART = 93


def words_of(error: BaseException) -> str:
    """Type and text of any exception. Its `__str__` may be a user's code, and may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as another:  # noqa: BLE001 - `__str__` can raise anything
        return f"{type(error).__name__}, whose text cannot be had ({type(another).__name__})"


MOST_WORDS = 800


def error_line(error: BaseException) -> str:
    """Type and text of any exception in one line, cut in the middle if it is long."""
    return cut_line(words_of(error))


def cut_line(text: str) -> str:
    """A text in one line, cut in the middle if it is long."""
    line, half = " ".join(text.split()), MOST_WORDS // 2
    return line if len(line) <= MOST_WORDS else f"{line[:half]} ... {line[-half:]}"


class YattError(Exception):
    """Base class, so that one ``except`` in a process's main function can distinguish ours from a bug."""

    exit_code = EXIT_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check has found. It is written as text where it is shown, and never read back.

    Attributes:
        level: fail: the run or job would be refused. warn, note: allowed, but rarely intended. ok: nothing is
            wrong. skip: cannot be known here. call: what a function has given on a few rows, or a judge has
            answered. sample: prompts, questions and lengths.
        key: of the run or site file; in `yatt diagnose` also the name of a check.
        place: where the key is written: ``run.yaml:12``.
        file: that the key names or that is in its folder, maybe with a line, if the mistake is there.
        says: what is wrong, and what to write; may have several lines.
        cure: what to do, if it is a sentence of its own.
        missing: the file or folder that is not here, if that is all that is wrong.
        has_colon: whether a colon is before the sentence; else key or file is its subject.
    """

    level: Literal["fail", "warn", "note", "ok", "skip", "call", "sample"] = "fail"
    key: str = ""
    place: str = ""
    file: str = ""
    says: str
    cure: str = ""
    missing: str = ""
    has_colon: bool = True

    def in_words(self) -> str:
        """Returns it as text."""
        where = ": ".join(filter(None, (self.place, self.key, self.file)))
        colon = ":" if where and self.has_colon else ""
        return " ".join(filter(None, (f"{where}{colon}", self.says, self.cure)))


def mistake_in(key: str, says: str) -> Finding:
    """Returns a mistake in the value of a key."""
    return Finding(key=key, says=says)


def doubt_about(key: str, says: str) -> Finding:
    """Returns a note about the value of a key, which is the subject of the sentence."""
    return Finding(level="note", key=key, says=says, has_colon=False)


class ConfigError(YattError):
    """Inputs of the user are invalid.

    Args:
        says: of a single mistake, as the `fields`, those of `Finding`.
        findings: several mistakes.
        heading: the line above them; without one they are lines without indentation.
    """

    exit_code = EXIT_USER_MISTAKE

    def __init__(
        self, says: str = "", *, findings: Iterable[Finding] = (), heading: str = "", **fields: Any
    ) -> None:
        super().__init__(says)
        self.findings = tuple(findings) or (Finding(says=says, **fields),)
        self.heading = heading

    def __str__(self) -> str:
        lines = [finding.in_words() for finding in self.findings]
        if self.heading:
            lines = [self.heading, *(f"  {line}".replace("\n", "\n  ") for line in lines)]
        return "\n".join(lines)

    def about(self, key: str) -> "ConfigError":
        """Returns the error with a key for the findings that have none."""
        return self.with_each(lambda found: replace(found, key=found.key or key))

    def with_each(self, change: Callable[[Finding], Finding]) -> "ConfigError":
        """Returns the error with changed findings."""
        return ConfigError(findings=map(change, self.findings), heading=self.heading)


class WorkerFailed(YattError):
    """A child process ended, hung or answered with an error. The message has the path of its log."""


class Excluded(WorkerFailed):
    """The leader continues without this process of a controller."""

    exit_code = EXIT_EXCLUDED


class AlreadyGoing(ConfigError):
    """The run already has a process or a job; nothing was started."""


class LeaseLost(YattError):
    """A newer grant exists, or this one has expired. Stop using the resource at once."""


class DeadlineExceeded(YattError):
    """A wait ended without an answer. The message has the receiver, the duration, and where to look."""


class StaleAttempt(YattError):
    """A newer attempt of this run was claimed; it replaces this one."""

    exit_code = EXIT_WILL_CONTINUE


class FolderGone(YattError):
    """The run folder was removed. Nothing is written, and another start would not help."""

    exit_code = EXIT_DO_NOT_RESTART


class FolderUnreachable(YattError):
    """The run folder failed between attempts, permanently or for longer than the limit."""


class StoppedWaiting(YattError):
    """A signal ended a launcher while it waited for the run folder."""

    exit_code = EXIT_WILL_CONTINUE


class SyncMismatch(YattError):
    """After a weight update the engine's log-probs differ from the trainer's."""

    exit_code = EXIT_DO_NOT_RESTART


class CheckpointError(YattError):
    """A checkpoint cannot be read, or does not match its manifest.

    Args:
        of: the name of the checkpoint or file.
    """

    def __init__(self, says: str, *, of: str = "") -> None:
        super().__init__(f"{of}: {says}" if of else says)
        self.says = says


class NoCheckpointLeft(CheckpointError):
    """Checkpoints were committed, but none can be restored. Training from the start would hide this."""

    exit_code = EXIT_DO_NOT_RESTART


class StoreTakenOver(YattError):
    """Another run folder with the same run id has taken over the checkpoint store; this folder's run ends."""

    exit_code = EXIT_DO_NOT_RESTART


class StoreUnreachable(YattError):
    """The checkpoint store failed with another error than a missing file.

    Args:
        is_passing: the same call may succeed soon.
    """

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class CheckpointsMissing(StoreUnreachable):
    """The store has no checkpoint, but the run's ledger has commits. The folder may not be mounted."""
