"""Every exception yatt raises on purpose, and the exit code each one ends a process with.

YattError
|- ConfigError        the user's: a file, an argument, a model or a dataset is wrong
|- WorkerFailed       the controller's: a trainer rank, engine or reward process ended or broke a promise
|- LeaseLost          the controller's: this process may no longer touch the GPUs it held
|- DeadlineExceeded   the operator's: somebody who owed an answer did not give it in time
|- StaleAttempt         nobody's: a newer attempt of this run exists; this one ends itself
|- FolderGone         the operator's: the run folder was removed while the run was going on
|- FolderUnreachable  nobody's: the run folder did not answer between two attempts
|- StoppedWaiting     nobody's: a signal ended a wait for the run folder
|- NoProgress         the operator's: attempts end again and again without a new checkpoint
|- SyncMismatch       a programmer's: engine and trainer disagree about the same weights
|- CheckpointError    the operator's: a checkpoint is torn, missing or of another run
|- NoCheckpointLeft   the operator's: checkpoints were committed, and none of them can be restored
|- StoreTakenOver     nobody's: another folder of the same run.id has the checkpoint store now
|- StoreUnreachable   nobody's: the checkpoint store did not answer; what lies there may be whole
   |- CheckpointsMissing the operator's: the ledger has commits and the store has none; is it mounted?
"""

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
EXIT_WILL_CONTINUE = 75
EXIT_DO_NOT_RESTART = 93


def words_of(error: BaseException) -> str:
    """Kind and text of any exception. Its text is made by whoever wrote it, and that may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as another:  # noqa: BLE001 - whatever it is, there are no words
        return f"{type(error).__name__}, whose text cannot be had ({type(another).__name__})"


class YattError(Exception):
    """Base class, so that one ``except`` at a process's top can tell ours from a bug."""

    exit_code = EXIT_FAILED


class ConfigError(YattError):
    """Something of the user's cannot be used. The message names the key or place, the rule and the fix."""

    exit_code = EXIT_USER_MISTAKE


class WorkerFailed(YattError):
    """A child process ended, hung or answered with an error. The message says where its log is."""


class AlreadyGoing(ConfigError):
    """The run has a process or a job already; nothing was started beside it."""


class LeaseLost(YattError):
    """A newer grant exists, or this one ran out. Stop using the resource at once."""


class DeadlineExceeded(YattError):
    """A wait ended without its answer. The message says who owed it, for how long, and where to look."""


class StaleAttempt(YattError):
    """A newer attempt was claimed: another attempt of this run is the live one."""

    exit_code = EXIT_WILL_CONTINUE


class FolderGone(YattError):
    """The run folder is not there any more. Nothing is written, and starting again would not help."""

    exit_code = EXIT_DO_NOT_RESTART


class FolderUnreachable(YattError):
    """The run folder failed between attempts, for longer than it is waited for, or for good."""


class StoppedWaiting(YattError):
    """A launcher was told to end while it waited for the run folder."""

    exit_code = EXIT_WILL_CONTINUE


class NoProgress(YattError):
    """Attempt after attempt ended without a new checkpoint; starting again would not help."""

    exit_code = EXIT_DO_NOT_RESTART


class SyncMismatch(YattError):
    """After a weight update the engine's log-probs differ from the trainer's."""

    exit_code = EXIT_DO_NOT_RESTART


class CheckpointError(YattError):
    """A checkpoint that cannot be read as what its manifest promises."""


class NoCheckpointLeft(CheckpointError):
    """Checkpoints were committed and none of them can be restored. Training from the start would hide it."""

    exit_code = EXIT_DO_NOT_RESTART


class StoreTakenOver(YattError):
    """Another run folder with the same id has taken the checkpoint store over; this one's run is over."""

    exit_code = EXIT_DO_NOT_RESTART


class StoreUnreachable(YattError):
    """The checkpoint store failed otherwise than by saying that something is not there.

    Args:
        is_passing: the same call may work again soon.
    """

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class CheckpointsMissing(StoreUnreachable):
    """The store holds no checkpoint, although the run's ledger has commits. An unmounted folder looks so."""
