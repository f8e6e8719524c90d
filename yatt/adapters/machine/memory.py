"""Resident memory of process groups, measured from the kernel's counters.

The members of a group are read for every process of the machine, thousands on a large node. This is repeated
only after a process was started anywhere: the kernel counts starts (`processes` in /proc/stat), and while the
count is unchanged no process was started since. The memory is read every time.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable

FRESH_S = 1.0
"""Maximum age of the list of processes, because a process may also change its group."""

_HELD = re.compile(rb"^Rss(?:Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB$", re.MULTILINE)
_DATA = re.compile(rb"^VmData:\s*(\d+) kB$", re.MULTILINE)
_BORN = re.compile(rb"^processes (\d+)$", re.MULTILINE)


def num_born() -> int:
    """Returns the number of processes and threads started since boot; 0 if the kernel does not report it."""
    with open("/proc/stat", "rb", buffering=0) as stat:
        found = _BORN.search(stat.readall())
    return int(found[1]) if found else 0


def data_bytes() -> int:
    """Returns what the kernel compares with this process's RLIMIT_DATA."""
    return _counted(os.getpid(), _DATA)


class ProcessGroups:
    """Lists the processes of each process group.

    Args:
        count: returns the number of processes started since boot.
    """

    def __init__(self, count: Callable[[], int] = num_born) -> None:
        self._count = count
        self._groups: dict[int, list[int]] = {}
        self._num_born, self._looked_s = 0, 0.0
        self._counts = False
        """Whether the count has changed: in some sandboxes it is constant and cannot be used."""

    def resident_bytes(self, process_groups: Iterable[int], now_s: float) -> dict[int, int]:
        """Returns the anonymous and shared-memory resident bytes of each process group."""
        held = dict.fromkeys(process_groups, 0)
        for pid, group in self.members(held, now_s).items():
            with contextlib.suppress(OSError):  # the process ended meanwhile
                held[group] += _counted(pid, _HELD)
        return held

    def peak_bytes(self, process_groups: Iterable[int], now_s: float) -> dict[int, int]:
        """Returns the most resident bytes that one process of each process group has had so far."""
        peaks = dict.fromkeys(process_groups, 0)
        for pid, group in self.members(peaks, now_s).items():
            with contextlib.suppress(OSError):
                peaks[group] = max(peaks[group], _counted(pid, _PEAK))
        return peaks

    def members(self, process_groups: Iterable[int], now_s: float) -> dict[int, int]:
        """Returns every process of these process groups now: pid to group."""
        born = self._count()
        if not self._counts or born != self._num_born or now_s - self._looked_s > FRESH_S:
            self._counts |= 0 < self._num_born < born
            self._num_born, self._looked_s = born, now_s  # values from before the scan
            self._groups = _look()
        return {
            pid: group
            for group in process_groups
            for pid in self._groups.get(group, ())
            if _group_of(pid) == group
        }


def _look() -> dict[int, list[int]]:
    """Returns the processes of every process group."""
    groups: dict[int, list[int]] = {}
    # 20 times faster than reading /proc/*/stat.
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            group = os.getpgid(pid)
        except OSError:
            continue  # the process ended meanwhile
        if group in groups:
            groups[group].append(pid)
        else:
            groups[group] = [pid]
    return groups


def _group_of(pid: int) -> int:
    """Returns the process's group; 0, which no group has, once it has ended."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _counted(pid: int, lines: re.Pattern[bytes]) -> int:
    """Returns the sum of these lines of the process's status, in bytes."""
    with open(f"/proc/{pid}/status", "rb", buffering=0) as status:
        # A process that has ended and is not reaped yet has no such lines, and no memory.
        return sum(int(kib) << 10 for kib in lines.findall(status.readall()))
