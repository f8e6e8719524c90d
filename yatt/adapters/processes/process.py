"""Child processes of a controller: started in their own process group, ended by that group, reaped.

A child dies with its controller (`yatt.adapters.processes.bound`), and its end is detected at once. No
process is searched by name.
"""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.adapters.processes import bound
from yatt.adapters.processes.nursery_link import Fork, ForkedProcess, NotForked

TAIL_BYTES = 64 << 10
END = signal.SIGHUP
"""Signal that ends a worker. Not SIGTERM: Slurm sends that to all processes of a step, for the controller."""


def leave_notice_to_controller() -> None:
    """Ignores Slurm's SIGTERM in this process; its children have the default action."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a process even if its pid is reused. `place`: the boot and pid namespace of the pid."""

    pid: int
    begun: str
    place: str

    @classmethod
    def of(cls, pid: int) -> "Identity | None":
        """Returns the identity of a visible process, None if it does not exist."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        except OSError:
            return None
        if fields[0] in "ZX":
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(pid, fields[19], f"{boot} {Path('/proc/self/ns/pid').readlink()}")

    def is_of_here(self) -> bool:
        """Whether the process belongs to this boot of this machine, where its end can be seen."""
        here = Identity.of(os.getpid())
        return here is not None and here.place == self.place

    def is_gone(self) -> bool:
        """Whether the process has certainly ended; False also if it cannot be seen from here."""
        return self.is_of_here() and Identity.of(self.pid) != self


def open_log(log: Path) -> int:
    """Opens `log` for appending; returns the descriptor."""
    log.parent.mkdir(exist_ok=True)
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def spawn(
    argv: list[str], *, env: Mapping[str, str], log: Path, dies_with_us: bool = True
) -> "subprocess.Popen[bytes]":
    """Starts a child in its own process group, with output appended to `log`; see `spawn_to`."""
    descriptor = open_log(log)
    try:
        return spawn_to(argv, env=env, output=descriptor, dies_with_us=dies_with_us)
    finally:
        os.close(descriptor)


def spawn_to(
    argv: list[str],
    *,
    env: Mapping[str, str],
    output: int,
    dies_with_us: bool = True,
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Starts a child in its own process group, with output to a descriptor. It inherits `pass_fds`, under the
    same numbers.

    The child dies with the calling thread, unless `dies_with_us` is False. The call returns once the child
    has been started, which takes as long as the filesystem of its program hangs; other threads continue.

    Raises:
        OSError: no process can be created. If the program does not exist, the child writes so to `output` and
            ends with `bound.NOT_STARTED`.
    """
    subprocess._USE_VFORK = False  # type: ignore[misc]  # vfork would hold the GIL meanwhile
    parent = os.getpid() if dies_with_us else 0
    return subprocess.Popen(
        [sys.executable, "-P", "-S", bound.__file__, str(parent), *argv],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=pass_fds,
    )


@dataclass(frozen=True, slots=True)
class ChildProgram:
    """What a child executes. It inherits `pass_fds`, under the same numbers."""

    argv: list[str]
    env: Mapping[str, str]
    pass_fds: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class Child:
    """A started child. `ended` gets its return code in the event loop, once it is reaped."""

    name: str
    process: "subprocess.Popen[bytes] | ForkedProcess"
    log: Path
    ended: "asyncio.Future[int]"

    @property
    def pid(self) -> int:
        """The pid, which is also the id of its process group."""
        return self.process.pid

    def signal_group(self, number: signal.Signals) -> None:
        """Sends a signal to the whole group; a group that has ended is not an error."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:  # else the pid may be reused
                os.killpg(self.pid, number)


class ChildStart:
    """Starts a child in its own thread, which lives as long as the child.

    Args:
        output: descriptor of `log`; closed here after the child has ended, which may block.
        fork: an order to a nursery, which is tried first.

    Attributes:
        pid: of a child that a nursery has forked, from before it is a child of this process.
        not_forked: why the nursery has not forked it; None without one, if it has, or if `give_up` was called
            before.
        begun: the child; or OSError if it could not be started. Waits as long as the filesystem of its
            program hangs.
        over: done once no process of it runs or will run.

    Raises:
        OSError: EAGAIN, this process cannot start a thread now.
    """

    def __init__(
        self, name: str, program: ChildProgram, *, output: int, log: Path, fork: Fork | None = None
    ) -> None:
        self._name, self._program, self._output, self._log, self._fork = name, program, output, log, fork
        self.pid: int | None = None
        self.not_forked: str | None = None
        self._loop = asyncio.get_running_loop()
        self._is_unwanted = False
        self.begun: asyncio.Future[Child] = self._loop.create_future()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._live, name=f"child-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # Python reports a failed thread start so
            os.close(output)
            raise OSError(errno.EAGAIN, str(error)) from error

    def give_up(self) -> None:
        """Kills the child; one that cannot be killed yet is killed as soon as possible."""
        self._is_unwanted = True
        if not self.begun.cancel():
            if not self.begun.cancelled() and self.begun.exception() is None:
                self.begun.result().signal_group(signal.SIGKILL)
            return
        if self._fork is not None:
            self._fork.cancel()
        children = Path(f"/proc/self/task/{self._thread.native_id}/children")
        with contextlib.suppress(OSError, ValueError):  # not forked yet, or ended
            os.kill(int(children.read_text()), signal.SIGKILL)

    def _live(self) -> None:
        """Runs in the thread, because a child dies with the thread that started it."""
        try:
            self._live_with_child()
        finally:
            with contextlib.suppress(OSError):  # this process wrote nothing to it
                os.close(self._output)

    def _live_with_child(self) -> None:
        program = self._program
        try:
            process = self._forked() or spawn_to(
                program.argv, env=program.env, output=self._output, pass_fds=program.pass_fds
            )
        except Exception as error:  # noqa: BLE001 - passed on to the waiter
            is_os = isinstance(error, OSError)
            self._tell(self._failed, error if is_os else OSError(errno.EINVAL, str(error)))
            return
        child = Child(self._name, process, self._log, self._loop.create_future())
        if not self._tell(self._has_begun, child):
            child.signal_group(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # if SIGCHLD is ignored, the kernel has reaped it
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if not self._tell(self._reap, child):
            child.process.wait()

    def _forked(self) -> ForkedProcess | None:
        if self._fork is None:
            return None
        try:
            return self._fork.run(self._program.argv, self._program.env, self._output, self._noted)
        except NotForked as error:
            self.pid = None
            if self._is_unwanted:  # which says nothing about the nursery
                raise OSError(errno.ECANCELED, "it is not wanted any more") from error
            self.not_forked = str(error)
        return None

    def _noted(self, pid: int) -> None:
        self.pid = pid

    def _tell(self, callback: Callable[[Any], None], argument: object) -> bool:
        """Schedules a callback in the event loop; returns False if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            return False
        return True

    def _failed(self, error: OSError) -> None:
        self.over.set_result(None)
        if not self.begun.cancelled():
            self.begun.set_exception(error)

    def _has_begun(self, child: Child) -> None:
        if self.begun.cancelled():  # by `give_up`, or with the task that waited for it
            child.signal_group(signal.SIGKILL)
        else:
            self.begun.set_result(child)

    def _reap(self, child: Child) -> None:
        child.signal_group(signal.SIGKILL)  # remaining processes of its group
        child.ended.set_result(child.process.wait())
        self.over.set_result(None)


def log_tail(log: Path, lines: int = 15) -> str:
    """Returns the end of a log, for an error message."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    return ""
