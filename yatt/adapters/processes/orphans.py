"""Orphans: processes started by this process's children, whose parent has ended.

After `adopt_orphans` the kernel makes them children of this process's main thread instead of init's. They
differ from that thread's own children by their session: a process cannot join another session, and a child
that is started here stays in this session, unless the caller names it. Children of other threads
(`yatt.adapters.processes.process.ChildStart`) are not orphans.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from yatt import clock
from yatt.adapters.processes.bound import MARK
from yatt.core.attempts.orphans import Orphan

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
CHECK_S = 0.05


@dataclass(frozen=True, slots=True)
class _Stray:
    """A child of this process that it has not started itself."""

    pid: int
    session: int
    has_ended: bool


def adopt_orphans() -> bool:
    """Becomes the parent of every orphaned descendant (subreaper). If the kernel refuses, init remains it.

    Returns:
        Whether every orphan will descend from this process's own children. If a shell became this process by
        `exec`, it may have left other children; and process 1 of a container gets all orphans.
    """
    is_alone = os.getpid() != 1 and not _children()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return is_alone


@contextlib.contextmanager
def orphans_of_marked(limit_s: float) -> Iterator[None]:
    """Context manager: adopts orphans, and at the end kills those with the mark."""
    before = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    adopt_orphans()
    try:
        yield
    finally:
        end_orphans((), limit_s, only_marked=True)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def find_orphans(own: Collection[int]) -> tuple[list[Orphan], list[int]]:
    """Returns the living orphans, and the ended ones to reap. May block, because it reads files of other
    processes.

    Args:
        own: children that this process has started in new sessions.
    """
    found = list(_strays(own))
    living = [
        Orphan(pid=each.pid, session=each.session, worker=_worker(each.pid))
        for each in found
        if not each.has_ended
    ]
    return living, [each.pid for each in found if each.has_ended]


def end_orphans(own: Collection[int], limit_s: float, *, only_marked: bool = False) -> bool:
    """Kills and reaps all orphans, including new ones; returns whether none is left after `limit_s`.

    Args:
        only_marked: only descendants of workers, which have the mark in their environment.
    """
    until_s = clock.monotonic_s() + limit_s
    while True:
        found = list(_strays(own))
        ended = [each.pid for each in found if each.has_ended]
        reap_children(ended)  # their children may have become orphans meanwhile
        living = [each.pid for each in found if not each.has_ended]
        ours = [pid for pid in living if not only_marked or _worker(pid)]
        for pid in ours:
            kill_orphan(pid)
        if not ended and not ours:
            return True
        if clock.monotonic_s() >= until_s:
            return not ours
        if ours:
            time.sleep(CHECK_S)


def reap_children(pids: Iterable[int]) -> None:
    """Reaps ended children, so that their pids are free."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)


def kill_orphan(pid: int) -> None:
    """Kills a child of this process. Its pid cannot be reused before it is reaped."""
    with contextlib.suppress(OSError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it is not a child
        os.kill(pid, signal.SIGKILL)


def _strays(own: Collection[int]) -> Iterator[_Stray]:
    session = os.getsid(0)
    for pid in _children(str(os.getpid())) - set(own):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, _, its_session, *_ = _stat(pid)
            if int(its_session) != session:
                yield _Stray(pid, int(its_session), state in b"ZX")


def _stat(pid: int) -> list[bytes]:
    """Returns the fields after the process name, which may not be valid UTF-8."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def _children(task: str = "*") -> set[int]:
    """Returns this process's children, or those of one of its threads, from the kernel's list."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for listed in Path("/proc/self/task").glob(f"{task}/children"):
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
