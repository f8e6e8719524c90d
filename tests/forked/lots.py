"""Whether the processes of the running test are forked, and this process's stem."""

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
USUAL = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "ignore"}
"""What the usual environment of a test's processes has beside this process's."""

ABOUT_STARTS = ("test_nurseries.py", "test_nursery.py")
"""Modules whose subject is how processes start."""


def stem(env: Mapping[str, str]) -> Stem | None:
    """Returns the stem for a process with these variables; None if it is to be started."""
    one_of = int(os.environ.get(STARTED, "10"))
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test.partition("::")[0].endswith(ABOUT_STARTS):
        return None
    drawn = hashlib.sha256(f"{os.environ.get('YATT_DRAW')} {test}".encode()).digest()
    is_started = one_of and not int.from_bytes(drawn[:4], "big") % one_of
    if is_started or fixed_in(env) != fixed_in({**os.environ, **USUAL}):
        return None
    return the_stem()


@cache
def the_stem() -> Stem:
    """The only one: what a test changes that is read at a start, `Stem.can` notices."""
    fixed = fixed_in({**os.environ, **USUAL})
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    others = {name: value for name, value in os.environ.items() if name not in fixed_in(os.environ)}
    env = {**others, **fixed, "MALLOC_ARENA_MAX": "1"}
    with tempfile.TemporaryFile("w+") as log:
        with its:
            argv = [sys.executable, "-P", "-m", "tests.forked.stem", str(its.fileno())]
            process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, pass_fds=[its.fileno()])
        atexit.register(_end, process)
        ours.settimeout(START_S)
        if ours.recv(100) != READY:
            log.seek(0)
            raise AssertionError(f"no stem: {log.read()}")
    ours.setblocking(False)
    return Stem(ours, fixed)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
