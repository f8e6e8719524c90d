"""The process that has imported everything, and forks: `python -P -m tests.forked.stem LINK`."""

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import msgspec

from tests.forked.clone import fork_sibling
from tests.forked.popen import (
    BEGUN,
    GO,
    MOST_BYTES,
    MOST_DESCRIPTORS,
    READY,
    ForkingPopen,
    Order,
    Stem,
    fixed_in,
    module_of,
)  # fmt: skip

NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
OWNERS = ("yatt.cli.main", "yatt.control")
"""What starts further processes, and gets a stem of its own."""

MAINS = ("yatt.control", "yatt.genrm", "yatt.reward", "yatt.rollout", "yatt.trainer", "yatt.uploader")
LIBRARIES = (
    "yatt.cli.main", "yatt.launch.attempts", "yatt.launch.backends.local", "yatt.launch.input_trial",
    "yatt.reward.trial", "yatt.obs.trackers.follow", "yatt.adapters.nursery", "transformers",
    "vllm.v1.engine.llm_engine", "yatt.engine.vllm", "yatt.engine.scripted", "yatt.engine.transformers",
)  # fmt: skip
HIGH = 600
"""Descriptors are moved out of the way to numbers from this one on."""


def main() -> None:
    """Imports, and forks for the one who started this process until that ends. A forked process goes on from
    here as its program."""
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    fixed = fixed_in(os.environ)
    _import_everything()
    gc.collect()
    gc.freeze()
    link = socket.socket(fileno=int(sys.argv[1]))
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"what was imported has started threads: {threads}"
    link.send(READY)
    while True:
        order, descriptors, answer = _served(link)
        link.close()
        module = _become(order, descriptors)
        answer.send(BEGUN)
        answer.close()
        if module not in OWNERS or (own := _own_stem(fixed)) is None:
            break
        link = own
    sys.modules.pop(module, None)
    package = f"{module}.__main__"
    sys.modules.pop(package, None)
    _end(_exit_code(partial(runpy.run_module, module, run_name="__main__", alter_sys=True)))


def _exit_code(program: Callable[[], object]) -> int:
    """Runs the program; returns what an interpreter would end with."""
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Ends as an interpreter does, but does not take libraries apart, which would copy all their memory."""
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _import_everything() -> None:
    """Imports what the programs import. What that sets in the environment is forgotten: it is for GPUs."""
    from yatt.trainer import cpu_shim

    gc.disable()
    with cpu_shim._uncompiled():  # which a rank on CPU installs itself
        importlib.import_module("yatt.trainer.device")
        importlib.import_module("yatt.trainer.worker")
    for name in (*LIBRARIES, *(f"{main}.__main__" for main in MAINS)):
        importlib.import_module(name)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _served(link: socket.socket) -> tuple[Order, list[int], socket.socket]:
    """Forks for each order; returns in the forked process, once it may begin."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, MOST_BYTES, MOST_DESCRIPTORS)
        if not data:
            os._exit(0)
        memory, its, *rest = descriptors
        answer = socket.socket(fileno=its)
        with suppress(OSError):  # no process: the end of the socket says so
            if (pid := fork_sibling()) == 0:
                if answer.recv(MOST_BYTES) != GO:
                    os._exit(0)
                order = msgspec.msgpack.decode(os.pread(memory, os.fstat(memory).st_size, 0), type=Order)
                os.close(memory)
                return order, rest, answer
            answer.send(f"{pid}".encode())
        answer.close()
        for each in (memory, *rest):
            os.close(each)


def _become(order: Order, descriptors: Sequence[int]) -> str:
    """Makes this process what a started one would be; returns its module."""
    from yatt.adapters import bound
    from yatt.adapters.nursery import _seed_anew
    from yatt.adapters.shown_words import show_words

    if order.is_session:
        os.setsid()
    _place_descriptors(descriptors, order.targets)
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for which, soft, hard in order.limits:
        resource.setrlimit(which, (soft, hard))
    os.umask(order.umask)
    os.sched_setaffinity(0, order.cpus)
    os.chdir(order.folder)
    words = list(map(os.fsdecode, order.words))
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in order.variables.items()}
    ctypes.CDLL(None).prctl(1, 0)
    if order.owner:
        bound.die_with_parent(order.owner)
    if bound.MARK in env:
        bound.ignore_signals_for_controllers()
    if cpus := env.pop(bound.CPUS, ""):
        bound.bind(cpus)
    show_words(words, env)
    os.environ.clear()
    os.environ.update(env)
    _open_streams(is_unbuffered="PYTHONUNBUFFERED" in env)
    sys.orig_argv[:] = words
    begin = words.index("-m")
    sys.argv = ["", *words[begin + 2 :]]
    if words[1] != "-P":
        sys.path.insert(0, os.getcwd())
    _seed_anew()
    gc.enable()
    return module_of(words)


def _place_descriptors(descriptors: Sequence[int], targets: Sequence[int]) -> None:
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, HIGH) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, target in zip(moved, targets, strict=True):
        os.dup2(each, target)
        os.close(each)


def _open_streams(*, is_unbuffered: bool) -> None:
    """As an interpreter does at its start."""
    for name, number, mode in (("stdin", 0, "rb"), ("stdout", 1, "wb"), ("stderr", 2, "wb")):
        old: Any = getattr(sys, name)
        raw: Any = open(number, mode, 0 if is_unbuffered and number else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw, encoding=old.encoding, errors=old.errors,
            line_buffering=number == 2 or raw.isatty(), write_through=is_unbuffered and number > 0,
        )  # fmt: skip
        stream.mode = mode[0]  # type: ignore[misc, attr-defined]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _own_stem(fixed: Mapping[str, str]) -> socket.socket | None:
    """Forks this process's own stem. Returns in it, with its socket; None in this process, in which children
    are forked from now on."""
    from yatt.adapters import orphans, process
    from yatt.adapters.shown_words import show_words

    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        for number in NOT_FOR_US:
            signal.signal(number, signal.SIG_IGN)
        _die_with_parent()
        show_words([sys.executable, "-m", "tests.forked.stem"], {})  # it is none of the run's processes
        with open(os.devnull, "r+b") as null:  # it holds no pipe open whose end somebody waits for
            for number in (0, 1, 2):
                os.dup2(null.fileno(), number)
        return its
    its.close()
    stem, children = Stem(ours, fixed), orphans._children

    def spawn_to(
        argv: list[str], *, env: Mapping[str, str], output: int, dies_with_us: bool = True,
        pass_fds: Sequence[int] = (),
    ) -> "subprocess.Popen[bytes]":  # fmt: skip
        if not stem.can(argv, env):
            return started(argv, env=env, output=output, dies_with_us=dies_with_us, pass_fds=pass_fds)
        return ForkingPopen(
            argv, stem, dies_with_us=dies_with_us, env=dict(env), stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True, pass_fds=pass_fds,
        )  # fmt: skip

    started = process.spawn_to
    for name, module in list(sys.modules.items()):
        if name.startswith("yatt.") and vars(module).get("spawn_to") is started:
            vars(module)["spawn_to"] = spawn_to
    orphans._children = lambda task="*": children(task) - {pid} - stem.pids()
    return None


if __name__ == "__main__":
    main()
