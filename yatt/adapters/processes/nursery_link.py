"""The owner's end of a nursery (`yatt.adapters.processes.nursery`): orders, and the children that come of
them.

The owner must adopt orphans (`yatt.adapters.processes.orphans.adopt_orphans`). A nursery forks twice and the
process between ends, so the kernel gives the child to the owner. The messages of one order, on a socket of
its own:

1. owner to nursery, on the common socket: one byte, with descriptors of the order, of the log, and of the
   child's end of this socket;
2. child to owner: its pid, once it looks like a started program; or `!` and why it is none;
3. owner to child: `GO`, after it has noted the pid; if the owner's end is closed instead, the child ends;
4. child to owner: `BEGUN`, once the owner is its parent.

Between 2 and 3 the child is not yet a child of the owner, so whoever looks at the owner's children never sees
one that is not noted.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

FORK_S = 5.0
"""Longest wait for a nursery that is ready. It needs milliseconds, unless it hangs."""

FATE_S = 5.0
"""Longest time until a child that ended before it had begun is handed over, so that it can be reaped."""

FORK, READY, GO, BEGUN, REFUSED = b"f", b"ready", b"go", b"begun", b"!"
DEVICES = "/dev/nvidia"
"""Beginning of the files' names by which a process uses GPUs."""

MOST_BYTES = 4096
"""Bound of each message; an order itself travels in a file in memory."""


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a child shall be. Words are bytes, because they need not be UTF-8.

    Attributes:
        words: `[sys.executable, "-P", "-m", MODULE, ...]`.
        variables: its whole environment.
        owner: pid of the process that becomes its parent.
    """

    words: list[bytes]
    variables: dict[bytes, bytes]
    owner: int

    @property
    def argv(self) -> list[str]:
        """The words as Python has them."""
        return [os.fsdecode(word) for word in self.words]

    @property
    def env(self) -> dict[str, str]:
        """The variables as Python has them."""
        return {os.fsdecode(name): os.fsdecode(value) for name, value in self.variables.items()}


class NotForked(Exception):
    """The nursery has not forked a child, which is then started by exec; its words say why."""


class ForkedProcess:
    """A child that a nursery has forked for this process; as `subprocess.Popen`, as far as yatt uses it."""

    def __init__(self, pid: int, returncode: int | None = None) -> None:
        self.pid, self.returncode = pid, returncode

    def wait(self) -> int:
        """Waits for its end and reaps it; returns its exit code, or the negative number of a signal."""
        if self.returncode is None:
            status = 0
            with contextlib.suppress(ChildProcessError):  # if SIGCHLD is ignored, the kernel has reaped it
                _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Fork:
    """One order to a nursery.

    Args:
        link: the owner's end of the nursery's socket, which does not block.
    """

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run(
        self, argv: list[str], env: Mapping[str, str], output: int, noted: Callable[[int], None]
    ) -> ForkedProcess:
        """Lets the nursery fork a child. Called in a thread; waits at most `FORK_S` for each answer.

        Args:
            output: descriptor of the child's log.
            noted: called with its pid before it is a child of this process.

        Raises:
            NotForked: no child has begun, and none will.
        """
        with self._ours:
            try:
                self._send(argv, env, output)
                pid = self._pid()
            except TimeoutError as error:
                raise NotForked(_slow()) from error
            except (OSError, ValueError) as error:
                raise NotForked(getattr(error, "strerror", None) or str(error)) from error
            noted(pid)
            why = ""
            try:
                self._ours.send(GO)
                if self._ours.recv(MOST_BYTES) == BEGUN:
                    return ForkedProcess(pid)
            except TimeoutError:  # the process between stands still
                why = _slow()
            except OSError:  # the child was killed, or `cancel` was called
                pass
        code = _ended(pid)
        if why or code is None or code >= 0:
            raise NotForked(why or "the child ended before it had begun")
        return ForkedProcess(pid, code)  # it was killed, as may happen to any process

    def cancel(self) -> None:
        """Lets `run` end soon, without a child unless it has begun. Called in another thread."""
        with contextlib.suppress(OSError):  # it is over
            self._ours.shutdown(socket.SHUT_RDWR)

    def _send(self, argv: list[str], env: Mapping[str, str], output: int) -> None:
        order = os.memfd_create("yatt-order")
        try:
            with self._theirs:
                wanted = ForkOrder(
                    words=[os.fsencode(word) for word in argv],
                    variables={os.fsencode(name): os.fsencode(value) for name, value in env.items()},
                    owner=os.getpid(),
                )
                os.pwrite(order, msgspec.msgpack.encode(wanted), 0)
                socket.send_fds(self.link, [FORK], [order, output, self._theirs.fileno()])
        finally:
            os.close(order)

    def _pid(self) -> int:
        self._ours.settimeout(FORK_S)
        answer = self._ours.recv(MOST_BYTES)
        if not answer or answer.startswith(REFUSED):
            raise NotForked(answer[1:].decode(errors="replace") or "it has ended")
        return int(answer)


def _slow() -> str:
    return f"it does not answer within {FORK_S:g} s"


def _ended(pid: int) -> int | None:
    """Ends and reaps a child that may not have begun, as soon as it is a child of this process; returns its
    exit code, None if it never was one."""
    until_s = time.monotonic() + FATE_S
    while time.monotonic() < until_s and Path(f"/proc/{pid}").exists():
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it is not ours yet
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.001)
    return None
