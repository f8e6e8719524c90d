"""The program of a nursery: it imports the libraries of one kind of worker, then forks workers of that kind.

    python -P -m yatt.adapters.processes.nursery --kind KIND --mains PACKAGE,... --preload MODULE --link FD
    ...

A node of eight ranks so reads its Python once, and a worker that was killed is back in the time of a fork.
What a child inherits is what its imports would have made: a nursery has one thread, has opened no GPU, and
runs no code of the user. Else it refuses, and the worker is started by exec.
`yatt.adapters.processes.nursery_link` describes how a child begins.

What /proc shows as the command line and environment of a child is changed to its own. The kernel reads them
from memory of the process; `PR_SET_MM_MAP` names another place and needs no privilege (Linux 3.18, with
CONFIG_CHECKPOINT_RESTORE, which the kernels of all distributions have).
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import runpy
import signal
import site
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from yatt.adapters.processes import bound, nursery_link
from yatt.adapters.processes.nursery_link import BEGUN, GO, MOST_BYTES, READY, REFUSED, ForkOrder
from yatt.adapters.processes.stack_dump import answer_stack_requests, leave_stack_requests
from yatt.errors import error_line

NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to all processes of a step or a terminal; the owner ends a nursery by SIGKILL."""

OWN = frozenset({bound.MARK, "CUDA_VISIBLE_DEVICES"})
"""Variables of each worker, whatever imports make of the nursery's."""

LOOK_S = 0.0005

PR_SET_MM, PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF
_shown: list[mmap.mmap] = []


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of <linux/prctl.h>."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                "start_code",
                "end_code",
                "start_data",
                "end_data",
                "start_brk",
                "brk",
                "start_stack",
                "arg_start",
                "arg_end",
                "env_start",
                "env_end",
                "auxv",
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show_words(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Lets /proc/PID/cmdline and /proc/PID/environ of this process show these words.

    Raises:
        OSError: the kernel refuses.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    memory = mmap.mmap(-1, len(words) + len(variables), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = begin + len(words), begin + len(words) + len(variables)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    code_start, code_end, stack, data_start, data_end, brk = _own_places()
    wanted = _MemoryMap(
        code_start,
        code_end,
        data_start,
        data_end,
        brk,
        libc.sbrk(0),
        stack,
        begin,
        middle,
        middle,
        end,
        0,
        0,
        _NO_FILE,
    )
    size = ctypes.c_ulong(ctypes.sizeof(wanted))
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(wanted), size, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _shown[:] = [memory]  # as long as the process lives


def _own_places() -> tuple[int, ...]:
    """Returns startcode, endcode, startstack, start_data, end_data and start_brk; see proc_pid_stat(5)."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return tuple(int(fields[number - 3]) for number in (26, 27, 28, 45, 46, 47))


def main() -> None:
    """Imports, then forks children until the owner ends. A child returns from `serve`, and runs its
    program."""
    parser = argparse.ArgumentParser(prog="yatt.adapters.processes.nursery", description=__doc__)
    for name in ("kind", "mains", "preload", "device", "run", "name"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("link", "threads", "attempt"):
        parser.add_argument(f"--{name}", required=True, type=int)
    arguments = parser.parse_args()
    on_interrupt = signal.getsignal(signal.SIGINT)  # a shell's background ignores it
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    answer_stack_requests(arguments.run, arguments.name, arguments.attempt)
    link = socket.socket(fileno=arguments.link)
    before = dict(os.environ)
    gc.disable()  # as `yatt.adapters.machine.collector.without_collections`
    for package in arguments.mains.split(","):
        _import_for_main(package)
    importlib.import_module(arguments.preload).preload(arguments.kind, arguments.device, arguments.threads)
    gc.freeze()
    _end_threads_that_return()
    nursery = _Nursery(link, before, on_interrupt)
    if why := _unfit() or _unable():
        link.send(REFUSED + why.encode())
        return
    link.send(READY)
    argv = nursery.serve()
    sys.argv = ["", *argv[argv.index("-m") + 2 :]]
    runpy.run_module(argv[argv.index("-m") + 1], run_name="__main__", alter_sys=True)


def _import_for_main(package: str) -> None:
    """Imports all that the main module of a package imports. The module itself is left to be run as main."""
    name = f"{package}.__main__"
    importlib.import_module(name)
    del sys.modules[name]


def _end_threads_that_return() -> None:
    """Forks once in vain: numpy's OpenBLAS ends its threads before a fork, and starts them again when they
    are used."""
    if pid := os.fork():
        os.waitpid(pid, 0)
    else:
        os._exit(0)


def _unfit() -> str:
    """Returns why a fork of this process would not be like a started one; empty if it would."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "its imports have started threads"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(nursery_link.DEVICES):
                return "its imports have opened a GPU"
    return ""


def _unable() -> str:
    """Returns why children could not show words of their own in /proc; empty if they can."""
    try:
        show_words(sys.orig_argv, os.environ)  # its own
    except OSError as error:
        return f"this kernel shows no other command line of a process: {error.strerror}"
    return ""


class _Nursery:
    """Forks children for the owner.

    Args:
        link: the socket of orders.
        before: the environment before the imports.
        on_interrupt: what a started process does on SIGINT.
    """

    def __init__(self, link: socket.socket, before: Mapping[str, str], on_interrupt: Any) -> None:
        self._link, self._on_interrupt = link, on_interrupt
        after = dict(os.environ)
        self._set = {
            name: value for name, value in after.items() if before.get(name) != value and name not in OWN
        }
        self._removed = before.keys() - after.keys()
        self._code = _code_files()

    def serve(self) -> list[str]:
        """Forks a child for each order; returns in a child, with its command line."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes between are not waited for
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._link, MOST_BYTES, 3)
            if not data:
                os._exit(0)
            order, output, answer = descriptors
            with socket.socket(fileno=answer) as owner:
                if why := _unfit():
                    owner.send(REFUSED + why.encode())
                elif os.fork() == 0:
                    return self._between(order, output, owner)
            for each in (order, output):
                os.close(each)

    def _between(self, order: int, output: int, owner: socket.socket) -> list[str]:
        """The process between: forks the child, and ends when the child has the owner's leave, or is dead."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ended child stays to be reaped by the owner
        wait, leave = os.pipe()
        own_pid = os.getpid()
        try:
            is_between = os.fork() > 0
        except OSError as error:
            owner.send(REFUSED + error_line(error).encode())
            os._exit(1)
        if is_between:
            for each in (order, output, leave, owner.detach()):
                os.close(each)
            os.read(wait, 1)
            os._exit(0)
        try:
            os.close(wait)
            wanted = msgspec.msgpack.decode(os.pread(order, os.fstat(order).st_size, 0), type=ForkOrder)
            os.close(order)
            self._become(wanted, output)
            owner.send(f"{os.getpid()}".encode())
            if owner.recv(MOST_BYTES) != GO:
                os._exit(1)
            os.close(leave)
            while os.getppid() == own_pid:
                time.sleep(LOOK_S)
            bound.die_with_parent(wanted.owner)
            owner.send(BEGUN)
            owner.close()
        except BaseException as error:  # noqa: BLE001 - the owner starts a process by exec instead
            with contextlib.suppress(OSError):
                owner.send(REFUSED + error_line(error).encode()[: MOST_BYTES - 1])
            os._exit(1)
        return wanted.argv

    def _become(self, wanted: ForkOrder, output: int) -> None:
        """Makes this process what `yatt.adapters.processes.bound`, exec and the imports would have made of
        it."""
        if changed := _changed(self._code):
            raise OSError(f"{changed} has changed since it was imported")
        self._link.close()
        leave_stack_requests()
        os.setsid()
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), 0)
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        for number in NOT_FOR_US:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, self._on_interrupt)
        env = wanted.env
        if bound.MARK in env:
            bound.ignore_signals_for_controllers()
        if cpus := env.pop(bound.CPUS, ""):
            bound.bind_to_cpus(cpus)
        argv = wanted.argv
        show_words(argv, env)
        os.environ.clear()
        os.environ.update(env | self._set)
        for name in self._removed:
            os.environ.pop(name, None)
        sys.orig_argv[:] = argv
        _seed_anew()
        gc.enable()


def _seed_anew() -> None:
    """Seeds libraries' generators that have other seeds in each process. Python's own does this by itself."""
    if random := sys.modules.get("numpy.random"):
        random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # not `torch.seed`: on GPUs all processes begin with one seed


def _code_files() -> dict[str, int]:
    """Returns what an installation or an edit changes, the folders of packages and yatt's files, with their
    times."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "yatt"]
    files = [module.__file__ for module in modules if getattr(module, "__file__", None)]
    found = {}
    for path in (*folders, *files):
        with contextlib.suppress(OSError):
            found[str(path)] = os.stat(str(path)).st_mtime_ns
    return found


def _changed(code: Mapping[str, int]) -> str:
    for path, modified_ns in code.items():
        try:
            if os.stat(path).st_mtime_ns == modified_ns:
                continue
        except FileNotFoundError:
            pass
        return path
    return ""


if __name__ == "__main__":
    main()
