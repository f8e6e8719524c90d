"""Processes that were started by this process's children, and whose parent has ended.

After `adopt_orphans` the kernel makes them children of this process, instead of init's. They are told from
its own children by their session: a process cannot join another session, and a child that this process starts
stays in its session, unless it is among those that the caller names.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from yatt import clock
from yatt.core.orphans import Orphan

PR_SET_CHILD_SUBREAPER = 36
MARK = "YATT_WORKER"
"""In the environment of a worker, and so of what it starts: which worker it is."""

CHECK_S = 0.05


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends. Where the kernel refuses, init stays it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def orphans(own: Collection[int]) -> list[Orphan]:
    """The orphans that live; those that have ended are reaped.

    Args:
        own: children that this process has started in sessions of their own.
    """
    found, session = [], os.getsid(0)
    for pid in _children() - set(own):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, _, its_session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(its_session) == session:
                continue
            if state in "ZX":
                os.waitpid(pid, os.WNOHANG)
            else:
                found.append(Orphan(pid=pid, session=int(its_session), worker=_worker(pid)))
    return found


def end_orphans(own: Collection[int], limit_s: float) -> bool:
    """Kill and reap all orphans, and what becomes an orphan by that; whether none is left after `limit_s`."""
    until_s = clock.monotonic_s() + limit_s
    while found := orphans(own):
        for each in found:
            kill_orphan(each.pid)
        if clock.monotonic_s() >= until_s:
            return False
        time.sleep(CHECK_S)
    return True


def kill_orphan(pid: int) -> None:
    """Kill a child of this process; its number is not given again before it is reaped here."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _children() -> set[int]:
    """This process's children, by the kernel's own list."""
    found: set[int] = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= set(map(int, listed.read_text().split()))
    return found


def _worker(pid: int) -> str:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == MARK.encode():
                return os.fsdecode(value)
    return ""
