"""Removes named shared memory (/dev/shm) that libraries leave behind when their processes are killed.

Nothing records the creator of such a file, so it is recorded while its processes live: a file is theirs if
they map it or have it open. It is removed when no process uses it. Only files of this user with names that
multiprocessing, vLLM, torch and NCCL use are considered.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from yatt import clock

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"(psm_|sem\.mp-|vllm_dist_|nccl-|torch_)[^/\n]*")
_MAPPED = re.compile(rb" (\d+) +" + re.escape(os.fsencode(FOLDER)) + rb"/", re.MULTILINE)
"""The inode in /proc/PID/maps. The name there may differ: a semaphore's file is created under a temporary
name and linked."""

CHECK_S = 0.1


def shared_memory_files() -> frozenset[str]:
    """Returns the names of the files that exist now."""
    with contextlib.suppress(OSError):
        return frozenset(name for name in os.listdir(FOLDER) if _NAME.fullmatch(name))
    return frozenset()


def used_by(pids: Iterable[int]) -> set[str]:
    """Returns the files of this user that these processes use, as far as this can be read."""
    return _used(_own(shared_memory_files()), pids)


def remove_unused(names: Iterable[str], limit_s: float) -> set[str]:
    """Removes these files, each once no process uses it; returns those still in use after `limit_s`.

    A killed process uses its memory until the kernel has cleaned it up.
    """
    until_s = clock.monotonic_s() + limit_s
    left = _own(name for name in names if _NAME.fullmatch(name))
    while left:
        used = _used(left, map(int, filter(str.isdigit, os.listdir("/proc"))))
        for name in left.keys() - used:
            with contextlib.suppress(OSError):
                os.unlink(FOLDER / name)
        left = {name: left[name] for name in used}
        if not left or clock.monotonic_s() >= until_s:
            break
        time.sleep(CHECK_S)
    return set(left)


def _own(names: Iterable[str]) -> dict[str, int]:
    """Returns those names that are files of this user, with their inodes."""
    found = {}
    for name in names:
        with contextlib.suppress(OSError):
            status = os.lstat(FOLDER / name)
            if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode):
                found[name] = status.st_ino
    return found


def _used(files: dict[str, int], pids: Iterable[int]) -> set[str]:
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    return {name for name, inode in files.items() if inode in inodes}


def _inodes(pid: int) -> set[int]:
    """Returns the inodes that a process maps or has open in the folder."""
    found: set[int] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb", buffering=0) as maps:
        found |= {int(inode) for inode in _MAPPED.findall(maps.readall())}
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(descriptor.path).startswith(f"{FOLDER}/"):
                    found.add(os.stat(descriptor.path).st_ino)
    return found
