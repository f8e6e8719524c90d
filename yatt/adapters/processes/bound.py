"""Executes the given program, bound to its parent: ``python -P -S bound.py PARENT PROGRAM ...``.

PARENT 0: not bound.

Run by its path, in its own process: between fork and exec, a child of a process with threads has copies of
locks that are never released, and Python takes locks.
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
"""Environment variable with the CPUs of the program, ``0,1,2``; if absent, the parent's CPUs."""

NOT_STARTED = 127
"""Exit code if the program cannot be started, as of a shell."""

MARK = "YATT_WORKER"
"""Environment variable with the worker's name, in a worker and all processes that it starts."""

LASTING = frozenset(
    getattr(errno, name)
    for name in (
        "ENOENT",
        "EACCES",
        "EPERM",
        "ENOEXEC",
        "ENOTDIR",
        "EISDIR",
        "ELOOP",
        "ENAMETOOLONG",
        "E2BIG",
        "EINVAL",
    )
)
"""Errors of the program itself. All others are transient errors of the machine or filesystem."""

LIMIT_S, PAUSE_S = 600.0, 0.2
"""Time limit and pause of retries after transient errors; the parent may end the wait earlier."""


def die_with_parent(parent_pid: int) -> None:
    """Requests that the kernel kills this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the request
        os._exit(1)


def bind_to_cpus(cpus: str) -> None:
    """Binds this process to these CPUs. A failure is not an error, only slower."""
    try:
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    except (OSError, ValueError) as error:
        sys.stderr.write(f"yatt: not bound to CPUs {cpus}: {error}\n")


def ignore_signals_for_controllers() -> None:
    """Ignores what `scancel --signal=USR2` sends to every process; only a controller handles it."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def exec_program(argv: list[str]) -> NoReturn:
    """Executes the program, with retries after transient errors; else exits with `NOT_STARTED`."""
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
    """Binds this process to its parent, then executes the program."""
    parent_pid, *argv = sys.argv[1:]
    # nohup ignores SIGHUP, which children would inherit; Python ignores the other two from its start.
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if int(parent_pid):
        die_with_parent(int(parent_pid))
    if MARK in os.environ:
        ignore_signals_for_controllers()
    if cpus := os.environ.pop(CPUS, ""):
        bind_to_cpus(cpus)
    exec_program(argv)


if __name__ == "__main__":
    main()
