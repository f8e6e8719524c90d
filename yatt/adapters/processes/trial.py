"""Loads a user's file in a separate process, to find mistakes before a run starts.

So a file that ends its process, closes descriptors or hangs at import does no harm.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from yatt.adapters.processes.bound import MARK
from yatt.adapters.processes.orphans import orphans_of_marked
from yatt.adapters.processes.process import log_tail, spawn
from yatt.core.attempts.exits import describe_exit
from yatt.errors import ConfigError, Finding

_LINES = 5
"""Number of last log lines of the process that a message shows."""

ORPHANS_S = 3.0
"""Longest time to end the processes that a file has started."""


def run_trial(module: str, arguments: list[Any], *, path: Path, key: str, limit_s: float) -> None:
    """Runs `python -m module` with these arguments, whose main function is `answer_trial`.

    Args:
        path: the user's file, for messages.
        key: the run file's key that names it.
        limit_s: longest time for loading.

    Raises:
        ConfigError: the trial found a mistake; or the file ended the process, or was not loaded in time. Its
            cause is the filesystem's error, if there is one.
    """
    with trial_process(module, [key, str(path), *arguments]) as trial:
        try:
            how = describe_exit(trial.process.wait(limit_s))
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{path} was not loaded within {limit_s:g} s (launch.start_timeout_s). Do at the first call "
                "what takes long, or give it more time.",
                key=key,
            ) from None
        trial.end()
        if not trial.found.exists():
            raise ConfigError(f"loading {path} ended the process ({how}){trial.last_words()}.", key=key)
        raise_found(trial.found)


@dataclass(slots=True, kw_only=True)
class TrialProcess:
    """A process that tries something.

    Attributes:
        folder: its arguments, output and answer.
    """

    process: "subprocess.Popen[bytes]"
    folder: Path

    @property
    def found(self) -> Path:
        """The file with its answer."""
        return self.folder / "found"

    def last_words(self) -> str:
        """The last lines of its output, for a message."""
        said = "; ".join(log_tail(self.folder / "log", _LINES).splitlines())
        return f": {said}" if said else ""

    def end(self) -> None:
        """Kills it and the processes in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def trial_process(
    module: str, arguments: list[Any], env: Mapping[str, str] = types.MappingProxyType({})
) -> Iterator[TrialProcess]:
    """Starts `python -m module`, which reads its folder's `arguments`; ends it and what it has started.

    Args:
        env: variables beside those of this process.
    """
    with tempfile.TemporaryDirectory(prefix="yatt-trial-") as name:
        folder = Path(name)
        (folder / "arguments").write_text(json.dumps(arguments))
        with orphans_of_marked(ORPHANS_S):  # processes in other sessions
            process = spawn(
                [sys.executable, "-P", "-m", module, name],
                env={**os.environ, MARK: "trial", **env},
                log=folder / "log",
            )
            trial = TrialProcess(process=process, folder=folder)
            try:
                yield trial
            finally:
                trial.end()


def raise_found(found: Path) -> None:
    """Raises the error in a trial's answer, if it has one.

    Raises:
        ConfigError: its cause is the filesystem's error, if there was one.
    """
    heading, listed, number = json.loads(found.read_text())
    if listed:
        error = ConfigError(heading=heading, findings=[Finding(**each) for each in listed])
        raise error from (OSError(number, str(error)) if number else None)


def write_found(folder: Path, findings: Iterable[Finding], cause: BaseException | None, heading: str) -> None:
    """Writes what a trial has found, for `raise_found`."""
    number = cause.errno if isinstance(cause, OSError) else None
    (folder / "found").write_text(json.dumps((heading, [asdict(each) for each in findings], number)))


def read_arguments() -> tuple[Path, list[Any]]:
    """The folder and the arguments of this process, which is a trial's."""
    folder = Path(sys.argv[1])
    return folder, json.loads((folder / "arguments").read_text())


def answer_trial(check: Callable[..., object]) -> None:
    """Main function of a trial's process: calls `check` with the arguments, and writes its error."""
    folder, (key, path, *arguments) = read_arguments()
    try:
        check(*arguments)
        write_found(folder, (), None, "")
    except ConfigError as error:
        write_found(folder, error.findings, error.__cause__, error.heading)
    except OSError as error:
        says = f"{path} cannot be read: {error.strerror or error}."
        write_found(folder, [Finding(key=key, says=says)], error, "")
    os._exit(0)  # does not wait for threads that the file has started
