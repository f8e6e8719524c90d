"""Python stacks of running processes, on request: without root, without ptrace, and nothing is ever ended.

A process that answers has a file in memory, whose name says which process of which run it is, and
`faulthandler` writes the stacks of all its threads into it when `REQUEST` comes: also when the process hangs
in C code or holds the GIL. Whoever asks finds the file in `/proc/PID/fd`, which proves that the process is
prepared, signals it by a pidfd, which no other process can get, and reads the file. Without pidfds (before
Linux 5.3) a process that got the pid meanwhile ignores the signal.
"""

import contextlib
import errno
import faulthandler
import fcntl
import hashlib
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from yatt import clock
from yatt.adapters.processes.process import Identity

REQUEST = signal.SIGURG
"""A process that is not prepared ignores it. Slurm and the libraries of workers do not use it."""

POLL_S = 0.1
NUM_STILL = 3
"""Times that a dump is found unchanged before it counts as complete."""

MOST_BYTES = 1 << 20
"""Size beyond which the file in memory is emptied after it was read."""

_MARK = "yatt-stack"
_prepared_with: list[int] = []


def answer_stack_requests(run: Path | str, name: str, attempt: int = 0) -> None:
    """Prepares this process. A failure costs its stacks only.

    Args:
        name: of the process, as its log is named.
    """
    leave_stack_requests()
    with contextlib.suppress(OSError):
        file = os.memfd_create(f"{_MARK}:{run_mark(run)}:{attempt}:{name}"[:240])
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(REQUEST, file=file, all_threads=True)
        _prepared_with.append(file)


def leave_stack_requests() -> None:
    """Takes the preparation back: a forked process is not its parent."""
    while _prepared_with:
        faulthandler.unregister(REQUEST)
        os.close(_prepared_with.pop())


def run_mark(run: Path | str) -> str:
    """Returns the name of a run folder in names of files in memory."""
    return hashlib.sha256(os.path.realpath(run).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDump:
    """The stacks of one process. `text` is empty if it did not answer in time.

    `state`: of the process, as in /proc/PID/status; `waits_in`: the kernel function in which its main thread
    waits; `identity`: the same for the same process only.
    """

    name: str
    attempt: int
    pid: int
    host: str
    state: str
    waits_in: str
    identity: str
    text: str


@dataclass(slots=True)
class _Asked:
    pid: int
    name: str
    attempt: int
    file: Path
    begin: int
    size: int = 0
    num_still: int = 0


def stacks_here(run: Path | str, limit_s: float) -> list[StackDump]:
    """Returns the stacks of the run's processes that can be seen on this machine, by name.

    Args:
        limit_s: longest wait for the answers.
    """
    mark, deadline_s = run_mark(run), clock.monotonic_s() + limit_s
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    asked = [each for pid in pids if (each := _ask(pid, mark)) is not None]
    waiting = asked
    while waiting and clock.monotonic_s() < deadline_s:
        time.sleep(POLL_S)
        waiting = [each for each in waiting if not _is_complete(each)]
    return sorted(map(_dump, asked), key=lambda dump: (dump.name, dump.pid))


def _ask(pid: int, mark: str) -> _Asked | None:
    """Asks a process of this run for its stacks; returns None if it is none, or is gone."""
    with contextlib.suppress(OSError):
        descriptor = _pidfd(pid)
        try:
            asked = _prepared(pid, mark)
            if asked is not None and descriptor is not None:
                signal.pidfd_send_signal(descriptor, REQUEST)
            elif asked is not None:
                os.kill(pid, REQUEST)
            return asked
        finally:
            if descriptor is not None:
                os.close(descriptor)
    return None


def _pidfd(pid: int) -> int | None:
    """Returns a pidfd; None if the kernel has none (before Linux 5.3).

    Raises:
        OSError: there is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise


def _prepared(pid: int, mark: str) -> _Asked | None:
    """Returns the process's file if it is prepared and of this run."""
    pattern = re.compile(rf"/memfd:{_MARK}:{mark}:(\d+):(.+) \(deleted\)")
    for number in os.listdir(f"/proc/{pid}/fd"):
        file = Path(f"/proc/{pid}/fd/{number}")
        with contextlib.suppress(OSError):  # closed meanwhile
            if (match := pattern.fullmatch(os.readlink(file))) is not None and _catches(pid):
                return _Asked(pid, match[2], int(match[1]), file, os.stat(file).st_size)
    return None


def _catches(pid: int) -> bool:
    """Whether the process has a handler for the request."""
    return bool(int(_status(pid).get("SigCgt", "0"), 16) >> (REQUEST - 1) & 1)


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _is_complete(asked: _Asked) -> bool:
    try:
        size = os.stat(asked.file).st_size
    except OSError:  # the process has ended
        return True
    is_still = size > asked.begin and size == asked.size
    asked.num_still, asked.size = (asked.num_still + 1 if is_still else 0), size
    return asked.num_still >= NUM_STILL


def _dump(asked: _Asked) -> StackDump:
    status, identity = _status(asked.pid), Identity.of(asked.pid)
    waits_in = ""
    with contextlib.suppress(OSError):
        waits_in = Path(f"/proc/{asked.pid}/wchan").read_text().strip("\0\n")
    return StackDump(
        name=asked.name,
        attempt=asked.attempt,
        pid=asked.pid,
        host=os.uname().nodename,
        state=status.get("State", "ended"),
        waits_in="" if waits_in == "0" else waits_in,
        identity=f"{identity.place} {identity.pid} {identity.begun}" if identity else f"{asked.pid} ended",
        text=_read(asked),
    )


def _read(asked: _Asked) -> str:
    try:
        with asked.file.open("rb") as file:
            file.seek(asked.begin)
            text = file.read().decode(errors="replace")
        if asked.size > MOST_BYTES:
            os.truncate(asked.file, 0)
    except OSError:
        return ""
    return text
