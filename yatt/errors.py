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

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
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
    line = " ".join(words_of(error).split())
    half = MOST_WORDS // 2
    return line if len(line) <= MOST_WORDS else f"{line[:half]} ... {line[-half:]}"


class YattError(Exception):
    """Base class, so that one ``except`` in a process's main function can distinguish ours from a bug."""

    exit_code = EXIT_FAILED


class ConfigError(YattError):
    """An input of the user is invalid. The message names the key or place, the rule and the fix."""

    exit_code = EXIT_USER_MISTAKE


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
    """A checkpoint cannot be read, or does not match its manifest."""


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
