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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from yatt.adapters.bound import MARK
from yatt.adapters.orphans import orphans_of_marked
from yatt.adapters.process import log_tail, spawn
from yatt.core.exits import describe_exit
from yatt.errors import ConfigError

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
    with tempfile.TemporaryDirectory(prefix="yatt-trial-") as folder:
        found, log = Path(folder) / "found", Path(folder) / "log"
        argv = [sys.executable, "-P", "-m", module, json.dumps([str(found), key, str(path), *arguments])]
        with orphans_of_marked(ORPHANS_S):  # processes that the file has started in other sessions
            process = spawn(argv, env={**os.environ, MARK: "trial"}, log=log)
            try:
                how = describe_exit(process.wait(limit_s))
            except subprocess.TimeoutExpired:
                raise ConfigError(
                    f"{key}: {path} was not loaded within {limit_s:g} s (launch.start_timeout_s). "
                    "Do at the first call what takes long, or give it more time."
                ) from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # processes in its own session
                process.wait()
        if not found.exists():
            said = "; ".join(log_tail(log, _LINES).splitlines())
            raise ConfigError(
                f"{key}: loading {path} ended the process ({how}){f': {said}' if said else ''}."
            )
        error, number = json.loads(found.read_text())
        if error:
            raise ConfigError(error) from (OSError(number, error) if number else None)


def answer_trial(check: Callable[..., object]) -> None:
    """Main function of a trial's process: calls `check` with the arguments, and writes its error."""
    found, key, path, *arguments = json.loads(sys.argv[1])
    said: tuple[str, int | None] = "", None
    try:
        check(*arguments)
    except ConfigError as mistake:
        cause = mistake.__cause__
        said = str(mistake), cause.errno if isinstance(cause, OSError) else None
    except OSError as error:
        said = f"{key}: {path} cannot be read: {error.strerror or error}.", error.errno
    Path(found).write_text(json.dumps(said))
    os._exit(0)  # does not wait for threads that the file has started
