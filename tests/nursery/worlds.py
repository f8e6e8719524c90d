"""Processes of trainer worlds, forked from one that has imported megatron-core."""

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.runs import LOADED
from yatt.adapters.nursery_link import READY, Fork, ForkedProcess
from yatt.adapters.orphans import PR_SET_CHILD_SUBREAPER
from yatt.adapters.process import spawn_to

START_S = 120.0 * LOADED
LOOK_S = 0.01


class ForkedRank:
    """As `subprocess.Popen`, as far as worlds use it."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process

    def wait(self, timeout_s: float = START_S) -> int:
        until_s = time.monotonic() + timeout_s
        while self._process.returncode is None:
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                self._process.wait()
            elif time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("a rank", timeout_s)
            else:
                time.sleep(LOOK_S)
        return self._process.returncode

    def kill(self) -> None:
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)


def fork_rank(module: str, arguments: list[str], env: Mapping[str, str], output: int) -> ForkedRank:
    """Starts `python -m module arguments` from this process's nursery. All have the same environment."""
    argv = [sys.executable, "-P", "-m", module, *arguments]
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        return ForkedRank(Fork(_link(tuple(env.items()))).run(argv, env, output, lambda _: None))
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # orphans of other tests are not ours


@cache
def _link(env: tuple[tuple[str, str], ...]) -> socket.socket:
    folder = Path(tempfile.mkdtemp(prefix="yatt-worlds-"))
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [
        sys.executable, "-P", "-m", "yatt.adapters.nursery", "--kind", "worlds", "--device", "cpu",
        "--mains", "yatt.trainer", "--preload", "tests.nursery.trainer", "--threads", "1",
        "--link", str(its.fileno()), "--run", str(folder), "--attempt", "1", "--name", "worlds.1",
    ]  # fmt: skip
    with its, (folder / "log").open("wb") as log:
        process = spawn_to(argv, env=dict(env), output=log.fileno(), pass_fds=[its.fileno()])
    atexit.register(_end, process, folder)
    ours.settimeout(START_S)
    assert ours.recv(100) == READY, (folder / "log").read_text()
    ours.setblocking(False)
    return ours


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):
        (folder / "log").unlink()
        folder.rmdir()
