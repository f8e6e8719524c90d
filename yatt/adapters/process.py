"""Child processes of a controller: started in a group of their own, ended by that group, reaped.

A child dies with its controller (parent-death signal), and its end is seen at once (pidfd).
Nothing here finds a process by name.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
TAIL_BYTES = 64 << 10
END = signal.SIGHUP
"""Ends a worker. Not SIGTERM: Slurm sends that to every process of a step, as a notice to its controller."""


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends. Called in the child, before exec."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the request
        os._exit(1)


def leave_notice_to_controller() -> None:
    """Let Slurm's SIGTERM do nothing here, and whatever it does by default in this process's children."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)


def describe_exit(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-returncode}"


@dataclass(frozen=True, slots=True)
class Identity:
    """A process for good: its number can be given again, this cannot. `place` is where the number counts."""

    pid: int
    begun: str
    place: str

    @classmethod
    def of(cls, pid: int) -> "Identity | None":
        """Of a process seen from here, None if there is none."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        except OSError:
            return None
        if fields[0] in "ZX":
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(pid, fields[19], f"{boot} {Path('/proc/self/ns/pid').readlink()}")

    def is_of_here(self) -> bool:
        """Whether it is or was of this boot of this machine, where its end can be seen."""
        here = Identity.of(os.getpid())
        return here is not None and here.place == self.place

    def is_gone(self) -> bool:
        """Whether it has surely ended; False also if it cannot be seen from here."""
        return self.is_of_here() and Identity.of(self.pid) != self


def open_log(log: Path) -> int:
    """A descriptor that appends to `log`."""
    log.parent.mkdir(exist_ok=True)
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def spawn(argv: list[str], *, env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a child in a process group of its own, output appended to `log`."""
    descriptor = open_log(log)
    try:
        return spawn_to(argv, env=env, output=descriptor)
    finally:
        os.close(descriptor)


def spawn_to(argv: list[str], *, env: Mapping[str, str], output: int) -> "subprocess.Popen[bytes]":
    """Start a child in a process group of its own, output to a descriptor. Call it in the main thread: the
    child dies with the thread that started it."""
    parent_pid = os.getpid()

    def begin() -> None:
        signal.signal(END, signal.SIG_DFL)  # under nohup it would be ignored, by all that follow
        die_with_parent(parent_pid)

    return subprocess.Popen(
        argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True, preexec_fn=begin,
    )  # fmt: skip


@dataclass(slots=True)
class Child:
    """A running child and how to hear of its end."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    pidfd: int

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self.process.pid

    def signal_group(self, number: signal.Signals) -> None:
        """Send to the whole group; a group that is gone is not an error."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def start_child(
    name: str, argv: list[str], *, env: Mapping[str, str], output: int, log: Path,
    on_exit: Callable[[Child, int], None],
) -> Child:  # fmt: skip
    """Start `argv`; `on_exit(child, returncode)` runs in the event loop once it is reaped.

    Args:
        output: descriptor of `log`; closed here.

    Raises:
        OSError: it could not be started; nothing of it runs.
    """
    try:
        process = spawn_to(argv, env=env, output=output)
    finally:
        os.close(output)
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:  # nobody would hear of its end
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    child = Child(name, process, log, pidfd)
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(child.pidfd)
        os.close(child.pidfd)
        returncode = process.wait()
        child.signal_group(signal.SIGKILL)  # what the leader of the group left behind
        on_exit(child, returncode)

    loop.add_reader(child.pidfd, ended)
    return child


def log_tail(log: Path, lines: int = 15) -> str:
    """The end of a log, for an error message."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    return ""
