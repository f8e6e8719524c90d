"""The asking end of a stem: a `subprocess.Popen` whose process is forked.

The messages of one order, on a socket of its own:

1. to the stem, on the common socket: one byte, with descriptors of the order, of the stem's end of this
   socket, and of what the process shall inherit;
2. from the stem: its pid, or nothing;
3. to the process: `GO`, once its pid is noted: until then it is in the session of who asked, so that nobody
   takes it for an orphan;
4. from the process: `BEGUN`, once it is what was ordered.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

GO, READY, BEGUN = b"go", b"ready", b"begun"
ANSWER_S = 300.0
MOST_BYTES, MOST_DESCRIPTORS = 4096, 64

READ_AT_START = (
    "PYTHON", "LANG", "LC_", "LD_", "TZ", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "TORCH_COMPILE", "TORCHDYNAMO",
    "VLLM_LOGGING", "TMPDIR", "HF_HOME", "HF_HUB_",
)  # fmt: skip
"""How the names of variables begin that an interpreter or a library reads once."""

HARMLESS = ("PYTHONUNBUFFERED", "MALLOC_ARENA_MAX")
"""Such variables that a forked process follows, or that may be there without being asked for."""

FORKED = ("yatt.", "tests.nursery", "tests.integration.trainer.", "tests.bench.checkpoint", "tests.gpu.")
"""How the names of modules begin that a forked process may run."""

INHERITED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a started process ignores if its parent does; not SIGHUP (`yatt.adapters.processes.bound`)."""

LIMITS = tuple(getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_"))


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a forked process shall be.

    Attributes:
        words: its command line, `[python, "-P", "-m", MODULE, ...]`.
        limits: resource, soft and hard limit.
        targets: numbers of the descriptors that come with the order.
        ignored: signals that it ignores, as who asks for it does.
        owner: its parent, with which it dies; 0: it does not.
    """

    words: list[bytes]
    variables: dict[bytes, bytes]
    folder: bytes
    umask: int
    limits: list[tuple[int, int, int]]
    cpus: list[int]
    ignored: list[int]
    targets: list[int]
    is_session: bool
    owner: int


def fixed_in(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process cannot change any more."""
    return {
        name: value for name, value in env.items() if name.startswith(READ_AT_START) and name not in HARMLESS
    }


def module_of(words: Sequence[Any]) -> str:
    """The module of `[python, "-P", "-m", MODULE, ...]`; empty if the command line is another."""
    begin = 2 if len(words) > 1 and words[1] == "-P" else 1
    is_python = words[0] == sys.executable and len(words) > begin + 1 and words[begin] == "-m"
    return str(words[begin + 1]) if is_python else ""


class NotForked(Exception):
    """The stem has ended, or cannot fork."""


class Stem:
    """A stem of this process.

    Args:
        link: the socket of orders.
        fixed: variables that it has read.
    """

    def __init__(self, link: socket.socket, fixed: Mapping[str, str]) -> None:
        self._link, self._fixed = link, dict(fixed)
        self._lock = threading.Lock()
        self._children: list[tuple[subprocess.Popen[Any], bool]] = []

    def can(self, words: Sequence[Any], env: Mapping[str, str]) -> bool:
        """Whether a forked process would be like this one started."""
        return module_of(words).startswith(FORKED) and fixed_in(env) == self._fixed

    def pids_of_threads(self) -> set[int]:
        """Children that are not reaped and that other threads than the main one have asked for: a started one
        would be a child of its thread."""
        with self._lock:
            self._children = [each for each in self._children if each[0].returncode is None]
            return {process.pid for process, is_main in self._children if not is_main}

    def fork(self, process: "subprocess.Popen[Any]", order: Order, descriptors: Sequence[int]) -> None:
        """Forks, and tells `process` its pid.

        Raises:
            NotForked: there is and will be no process.
        """
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create("yatt-fork")
        with ours:
            ours.settimeout(ANSWER_S)
            try:
                with its:
                    os.pwrite(memory, msgspec.msgpack.encode(order), 0)
                    socket.send_fds(self._link, [b"f"], [memory, its.fileno(), *descriptors])
                pid = ours.recv(MOST_BYTES)
            except OSError as error:
                raise NotForked(str(error)) from error
            finally:
                os.close(memory)
            if not pid:
                raise NotForked("the stem cannot fork")
            process.pid = int(pid)
            process._child_created = True  # type: ignore[attr-defined]
            with self._lock:
                self._children.append((process, threading.current_thread() is threading.main_thread()))
            ours.send(GO)
            ours.recv(MOST_BYTES)  # or its end, which is its parent's business


class ForkingPopen(subprocess.Popen[Any]):
    """As `subprocess.Popen`, with a process that is forked if it can be.

    Args:
        dies_with_us: it is killed when this process ends. Only if it is forked.

    Raises:
        NotForked: it could be forked, but the stem has not done so.
    """

    def __init__(self, words: Sequence[Any], stem: Stem | None, *, dies_with_us: bool = False, **how: Any):
        self._stem, self._dies_with_us = stem, dies_with_us
        super().__init__(words, **how)

    def _execute_child(  # type: ignore[override, misc] # as CPython 3.11 to 3.14 have it
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int,
        c2pwrite: int, errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any,
        umask: int, start_new_session: Any, process_group: int,
    ) -> None:  # fmt: skip
        variables = dict(os.environ if env is None else env)
        is_plain = not (executable or preexec_fn or shell) and {gid, gids, uid} == {None}
        if is_plain and umask < 0 and process_group < 0 and self._stem and self._stem.can(args, variables):
            order = Order(
                words=list(map(os.fsencode, args)),
                variables={os.fsencode(name): os.fsencode(value) for name, value in variables.items()},
                folder=os.fsencode(cwd or os.getcwd()), umask=_own_umask(),
                limits=[(each, *resource.getrlimit(each)) for each in LIMITS],
                cpus=sorted(os.sched_getaffinity(0)),
                ignored=[each for each in INHERITED if signal.getsignal(each) == signal.SIG_IGN],
                targets=[0, 1, 2, *pass_fds],
                is_session=bool(start_new_session), owner=os.getpid() if self._dies_with_us else 0,
            )  # fmt: skip
            given = (p2cread, c2pwrite, errwrite)
            standard = [number if each < 0 else each for number, each in enumerate(given)]
            self._stem.fork(self, order, [*standard, *pass_fds])
            ends = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]
            return
        super()._execute_child(  # type: ignore[misc]
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
            start_new_session, process_group,
        )  # fmt: skip


def _own_umask() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
