"""Loads a user's function in a separate process, to find mistakes before a run starts.

So a file that ends its process, closes descriptors or hangs at import does no harm.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from yatt.adapters.bound import MARK
from yatt.adapters.orphans import orphans_of_marked
from yatt.adapters.process import log_tail, spawn
from yatt.core.exits import describe_exit
from yatt.errors import ConfigError
from yatt.reward.functions import load_function

_LINES = 5
"""Number of last log lines of the process that a message shows."""

ORPHANS_S = 3.0
"""Longest time to end the processes that a file has started."""


def try_function(path: Path, name: str, key: str, *, must_be_async: bool, limit_s: float) -> None:
    """Loads the function in a child process.

    Args:
        key: key of the run file's entry, for messages.
        limit_s: longest time for loading.

    Raises:
        ConfigError: as in `load_function`; or the file ended the process, or was not loaded in time. Its
            cause is the filesystem's error, if there is one.
    """
    with tempfile.TemporaryDirectory(prefix="yatt-trial-") as folder:
        found, log = Path(folder) / "found", Path(folder) / "log"
        arguments = json.dumps([str(path), name, key, must_be_async, str(found)])
        argv = [sys.executable, "-P", "-m", "yatt.reward.trial", arguments]
        with orphans_of_marked(ORPHANS_S):  # processes that the file has started in other sessions
            process = spawn(argv, env={**os.environ, MARK: "trial"}, log=log)
            try:
                how = describe_exit(process.wait(limit_s))
            except subprocess.TimeoutExpired:
                raise ConfigError(
                    f"{key}.path: {path} was not loaded within {limit_s:g} s (launch.start_timeout_s). "
                    "Do at the first call what takes long, or give it more time."
                ) from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # processes in its own session
                process.wait()
        if not found.exists():
            said = "; ".join(log_tail(log, _LINES).splitlines())
            raise ConfigError(
                f"{key}.path: loading {path} ended the process ({how}){f': {said}' if said else ''}."
            )
        error, number = json.loads(found.read_text())
        if error:
            raise ConfigError(error) from (OSError(number, error) if number else None)


def main() -> None:
    """Loads one function and writes the error, which is empty if the function can be used."""
    path, name, key, must_be_async, found = json.loads(sys.argv[1])
    said: tuple[str, int | None] = "", None
    try:
        load_function(Path(path), name, key, must_be_async=must_be_async)
    except ConfigError as mistake:
        cause = mistake.__cause__
        said = str(mistake), cause.errno if isinstance(cause, OSError) else None
    except OSError as error:
        said = f"{key}.path: {path} cannot be read: {error.strerror or error}.", error.errno
    Path(found).write_text(json.dumps(said))
    os._exit(0)  # does not wait for threads that the file has started


if __name__ == "__main__":
    main()
