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
    NotForked,
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
    "yatt.cli.main", "yatt.launch.attempt.attempts", "yatt.launch.attempt.on_this_machine",
    "yatt.launch.checks.input_trial",
    "yatt.reward.trial", "yatt.obs.trackers.follow", "yatt.adapters.processes.nursery", "transformers",
    "vllm.v1.engine.llm_engine", "yatt.engine.vllm", "yatt.engine.scripted", "yatt.engine.transformers",
)  # fmt: skip
PR_SET_PDEATHSIG = 1
HIGH = 600
"""Descriptors are moved out of the way to numbers from this one on."""


def main() -> None:
    """Imports, and forks for the one who started this process until that ends. A forked process goes on from
    here as its program."""
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    fixed = fixed_in(os.environ)
    _import_everything()
    gc.collect()
    gc.freeze()
    link = socket.socket(fileno=int(sys.argv[1]))
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"what was imported has started threads: {threads}"
    link.send(READY)
    while True:
        order, descriptors = _served(link)
        link.close()
        module = module_of(list(map(os.fsdecode, order.words)))
        if module not in OWNERS or (own := _own_stem(fixed, descriptors)) is None:
            break
        link = own
    _become(order, descriptors)
    for name in (module, f"{module}.__main__"):
        sys.modules.pop(name, None)
    _end(_exit_code(partial(runpy.run_module, module, run_name="__main__", alter_sys=True)))


INTERRUPTED, UNWRITTEN = -1, 120
"""Ended by SIGINT; the exit code of an interpreter that cannot flush its output."""


def _exit_code(program: Callable[[], object]) -> int:
    """Runs the program; returns what an interpreter would end with."""
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(*sys.exc_info())
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> NoReturn:
    """Ends as an interpreter does, but does not take libraries apart, which would copy all their memory."""
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # ValueError: the program has closed it
            code = code if stream.closed else UNWRITTEN
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _import_everything() -> None:
    """Imports what the programs import. What that sets in the environment is forgotten: it is for GPUs."""
    from yatt.trainer.mcore import cpu_shim

    gc.disable()
    with cpu_shim._uncompiled():  # which a rank on CPU installs itself
        importlib.import_module("yatt.trainer.device")
        importlib.import_module("yatt.trainer.worker")
    for name in (*LIBRARIES, *(f"{main}.__main__" for main in MAINS)):
        importlib.import_module(name)


def _served(link: socket.socket) -> tuple[Order, list[int]]:
    """Forks for each order; returns in the forked process, once it may begin: its order, and the descriptors
    of the answer and of what it inherits."""
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
                return order, [answer.detach(), *rest]
            answer.send(f"{pid}".encode())
        answer.close()
        for each in (memory, *rest):
            os.close(each)


def _become(order: Order, descriptors: Sequence[int]) -> None:
    """Makes this process what a started one would be, and answers that it is."""
    from yatt.adapters.processes import bound
    from yatt.adapters.processes.nursery import _seed_anew, show_words

    if order.is_session:
        os.setsid()
    answer = _place_descriptors(descriptors, order.targets)
    _inherit(order)
    words = list(map(os.fsdecode, order.words))
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in order.variables.items()}
    if order.owner:
        bound.die_with_parent(order.owner)
    if bound.MARK in env:
        bound.ignore_signals_for_controllers()
    if cpus := env.pop(bound.CPUS, ""):
        bound.bind_to_cpus(cpus)
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
    answer.send(BEGUN)
    answer.close()


def _inherit(order: Order) -> None:
    """Takes over what a started process has from its parent."""
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN if number in order.ignored else signal.SIG_DFL)
    if signal.SIGINT not in order.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for which, soft, hard in order.limits:
        resource.setrlimit(which, (soft, hard))
    os.umask(order.umask)
    os.sched_setaffinity(0, order.cpus)
    os.chdir(order.folder)


def _place_descriptors(descriptors: Sequence[int], targets: Sequence[int]) -> socket.socket:
    """Gives what is inherited its numbers; returns the socket of the answer, which is out of their way."""
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, HIGH) for each in descriptors]
    for each in descriptors:
        os.close(each)
    answer, *inherited = moved
    for each, target in zip(inherited, targets, strict=True):
        os.dup2(each, target)
        os.close(each)
    return socket.socket(fileno=answer)


def _open_streams(*, is_unbuffered: bool) -> None:
    """As an interpreter does at its start."""
    for name, number, mode in (("stdin", 0, "rb"), ("stdout", 1, "wb"), ("stderr", 2, "wb")):
        old: Any = getattr(sys, name)
        raw: Any = open(number, mode, 0 if is_unbuffered and number else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw, encoding=old.encoding, errors=old.errors,
            line_buffering=not is_unbuffered and (number == 2 or raw.isatty()), write_through=is_unbuffered,
        )  # fmt: skip
        stream.mode = mode[0]  # type: ignore[misc, attr-defined]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _own_stem(fixed: Mapping[str, str], descriptors: Sequence[int]) -> socket.socket | None:
    """Forks this process's own stem, before anybody could take that for the process itself. Returns in it,
    with its socket; None in this process, in which children are forked from now on.

    Args:
        descriptors: of this process; its stem holds none of them open.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        ours.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for each in descriptors:
            os.close(each)
        with open(os.devnull, "r+b") as null:
            for number in (0, 1, 2):
                os.dup2(null.fileno(), number)
        return its
    its.close()
    _fork_children(Stem(ours, fixed), pid)
    return None


def _fork_children(stem: Stem, pid: int) -> None:
    """Replaces where yatt starts processes, in this process's memory; and how it looks for orphans: its stem
    is none, nor is what other threads have started."""
    from yatt.adapters.processes import orphans, process

    started, children = process.spawn_to, orphans._children

    def spawn_to(
        argv: list[str], *, env: Mapping[str, str], output: int, dies_with_us: bool = True,
        pass_fds: Sequence[int] = (),
    ) -> "subprocess.Popen[bytes]":  # fmt: skip
        if stem.can(argv, env):
            with suppress(NotForked):
                return ForkingPopen(
                    argv, stem, dies_with_us=dies_with_us, env=dict(env), stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output, start_new_session=True, pass_fds=pass_fds,
                )  # fmt: skip
        return started(argv, env=env, output=output, dies_with_us=dies_with_us, pass_fds=pass_fds)

    def children_of(task: str = "*") -> set[int]:
        return children(task) - {pid} - (set() if task == "*" else stem.pids_of_threads())

    for name, module in list(sys.modules.items()):
        if name.startswith("yatt.") and vars(module).get("spawn_to") is started:
            vars(module)["spawn_to"] = spawn_to
    orphans._children = children_of


if __name__ == "__main__":
    main()
