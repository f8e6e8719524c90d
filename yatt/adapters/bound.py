"""Becomes the program that follows, bound to its parent: ``python -P -S bound.py PARENT PROGRAM ...``.

PARENT 0 binds to nobody.

Run by its path, in a process of its own: between fork and exec a child of a process with threads has copies
of locks that nobody will ever release, and Python takes locks.
"""

import ctypes
import errno
import os
import signal
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1
CPUS = "YATT_CPUS"
"""In the environment: the CPUs that the program is to run on, ``0,1,2``; if absent, those of its parent."""

NOT_STARTED = 127
"""The exit code of a shell that finds no such program."""

MARK = "YATT_WORKER"
"""In the environment of a worker, and so of what it starts: which worker it is."""

LASTING = frozenset(
    getattr(errno, name)
    for name in (
        "ENOENT", "EACCES", "EPERM", "ENOEXEC", "ENOTDIR", "EISDIR", "ELOOP", "ENAMETOOLONG", "E2BIG",
        "EINVAL",
    )
)  # fmt: skip
"""What is wrong with the program itself. Anything else is trouble of a machine or filesystem, and passes."""

LIMIT_S, PAUSE_S = 600.0, 0.2
"""How long that is waited for; whoever waits for the program may end it before."""


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, and so with its parent."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the request
        os._exit(1)


def bind(cpus: str) -> None:
    """Run on these CPUs only. One that cannot is slower and no worse."""
    try:
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    except (OSError, ValueError) as error:
        sys.stderr.write(f"yatt: not bound to CPUs {cpus}: {error}\n")


def become(argv: list[str]) -> NoReturn:
    """Go on as this program, as soon as it can be executed; else end with `NOT_STARTED`."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            if error.errno in LASTING or time.monotonic() > until_s:
                sys.stderr.write(f"yatt: {argv[0]} cannot be started: {error.strerror or error}\n")
                os._exit(NOT_STARTED)
        time.sleep(PAUSE_S)


def main() -> NoReturn:
    """Bind this process to its parent, then become the program."""
    parent_pid, *argv = sys.argv[1:]
    # Under nohup the first would be ignored, by all that follow; Python ignores the others from its start.
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if int(parent_pid):
        die_with_parent(int(parent_pid))
    if MARK in os.environ:  # `scancel --signal=USR2` reaches every process; it is the controller's
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
    if cpus := os.environ.pop(CPUS, ""):
        bind(cpus)
    become(argv)


if __name__ == "__main__":
    main()
