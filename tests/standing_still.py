"""A program on a filesystem that stands still: a lease on its file, which the kernel has openers wait for."""

import contextlib
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path


class Lease:
    """The write lease of a copy of a program. Nobody can begin the program before `release`, or before the
    kernel waits no longer: 45 s (`/proc/sys/fs/lease-break-time`)."""

    def __init__(self, program: Path) -> None:
        self._descriptor: int | None = os.open(program, os.O_RDONLY)
        fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)  # not SIGIO, which ends a process
        fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def put_interpreter(at: Path) -> None:
    """A copy of this interpreter, with what it can import."""
    venv = Path(sys.prefix)
    at.parent.mkdir(parents=True, exist_ok=True)
    if not (root := at.parent.parent).joinpath("pyvenv.cfg").exists():
        shutil.copy(venv / "pyvenv.cfg", root)
        (root / "lib").symlink_to(venv / "lib")
    new = at.with_suffix(".new")
    shutil.copy(os.path.realpath(sys.executable), new)
    new.rename(at)


@contextlib.contextmanager
def interpreter_that_stands_still(at: Path) -> Iterator[Lease]:
    """Whoever starts it from now on waits; who runs it already does not."""
    put_interpreter(at.with_suffix(".leased"))
    lease = Lease(at.with_suffix(".leased"))
    at.with_suffix(".leased").rename(at)
    try:
        yield lease
    finally:
        lease.release()
