"""Whether the processes of a test are forked, and the stem of this process of pytest."""

import atexit
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.forked.popen import READY, Stem, fixed_in

STARTED = "YATT_STARTED"
"""Environment variable: one of so many tests has started processes; 1: all have, 0: none has."""

START_S = 360.0
ABOUT_STARTS = ("test_nurseries.py", "test_nursery.py")
"""Modules whose subject is how processes start."""

ROOT = Path(__file__).parents[2]
_usual: dict[str, str] = {}


def remember_environment() -> None:
    """Notes the environment of this process before any test has changed it: the stem gets that."""
    _usual.update({**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"})


def as_remembered(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without what libraries of a test have set in this process, as OpenCV sets
    LD_LIBRARY_PATH and vLLM LD_PRELOAD. Outside of pytest they are returned as they are."""
    if not _usual:
        return dict(env)
    names = [name for name in {**env, **_usual} if name.startswith("LD_")]
    return {k: v for k, v in env.items() if k not in names} | {k: _usual[k] for k in names if k in _usual}


def is_started(test: str) -> bool:
    """Whether the processes of a test are started."""
    one_of = int(os.environ.get(STARTED, "10"))
    drawn = hashlib.sha256(f"{os.environ.get('YATT_DRAW')} {test}".encode()).digest()
    is_drawn = one_of > 0 and not int.from_bytes(drawn[:4], "big") % one_of
    return is_drawn or test.partition("::")[0].endswith(ABOUT_STARTS)


def stem(env: Mapping[str, str]) -> Stem | None:
    """Returns the stem for a process with these variables; None if it is to be started, as all are outside of
    pytest."""
    if not _usual:
        return None
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return None if is_started(test) or fixed_in(env) != fixed_in(_usual) else the_stem()


@cache
def the_stem() -> Stem:
    """Returns the stem, which it starts at first."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryFile("w+") as log:
        with its:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.forked.stem", str(its.fileno())],
                env={**_usual, "MALLOC_ARENA_MAX": "1"}, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, pass_fds=[its.fileno()],
            )  # fmt: skip
        atexit.register(_end, process)
        ours.settimeout(START_S)
        if ours.recv(100) != READY:
            log.seek(0)
            raise AssertionError(f"no stem: {log.read()}")
    ours.setblocking(False)
    return Stem(ours, fixed_in(_usual))


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
