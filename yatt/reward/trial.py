"""Loads a user's function in a process of its own, to find mistakes before a run starts.

A file that ends its process, closes descriptors or hangs when it is loaded then harms nobody.
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
"""Of what the process said last, for a message."""

ORPHANS_S = 3.0
"""How long it may take to end what a file has started."""


def try_function(path: Path, name: str, key: str, *, must_be_async: bool, limit_s: float) -> None:
    """Load the function in a child process.

    Args:
        key: of the run file's entry, for messages.
        limit_s: how long loading may take.

    Raises:
        ConfigError: as `load_function`; or the file ended the process, or was not loaded in time. Made from
            the error of a filesystem, if that is the cause.
    """
    with tempfile.TemporaryDirectory(prefix="yatt-trial-") as folder:
        found, log = Path(folder) / "found", Path(folder) / "log"
        arguments = json.dumps([str(path), name, key, must_be_async, str(found)])
        argv = [sys.executable, "-P", "-m", "yatt.reward.trial", arguments]
        with orphans_of_marked(ORPHANS_S):  # what the file has started in sessions of their own
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
                    os.killpg(process.pid, signal.SIGKILL)  # and in its own
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
    """Load one function and write what is wrong with it, nothing if it can be used."""
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
    os._exit(0)  # not waiting for threads that the file has started


if __name__ == "__main__":
    main()
