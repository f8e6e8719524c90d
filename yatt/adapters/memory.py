"""How much memory process groups really keep, by the kernel's count. Measured, never asked.

Who is in a group is asked of the kernel for every process of the machine, thousands on a large node. That is
done anew only after a process was started anywhere: the kernel counts those (`processes` in /proc/stat), and
while the count stands still nobody can have come in by birth. How much each keeps is read every time.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable

FRESH_S = 1.0
"""A look at all processes is used no longer than this: one may also change its group."""

_HELD = re.compile(rb"^Rss(?:Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)
_BORN = re.compile(rb"^processes (\d+)$", re.MULTILINE)


def num_born() -> int:
    """Processes and threads started since the machine did; 0 where the kernel does not tell."""
    with open("/proc/stat", "rb", buffering=0) as stat:
        found = _BORN.search(stat.readall())
    return int(found[1]) if found else 0


class ProcessGroups:
    """Which processes are in which process group.

    Args:
        count: how many processes were started since the machine was.
    """

    def __init__(self, count: Callable[[], int] = num_born) -> None:
        self._count = count
        self._groups: dict[int, list[int]] = {}
        self._num_born, self._looked_s = 0, 0.0
        self._counts = False
        """Whether the count was seen to move: in some sandboxes it is a mere constant, and says nothing."""

    def resident_bytes(self, process_groups: Iterable[int], now_s: float) -> dict[int, int]:
        """Anonymous and shared-memory resident bytes of each process group, summed over its processes."""
        held = dict.fromkeys(process_groups, 0)
        for pid, group in self.members(held, now_s).items():
            with contextlib.suppress(OSError):  # the process ended while we looked
                held[group] += _resident(pid)
        return held

    def members(self, process_groups: Iterable[int], now_s: float) -> dict[int, int]:
        """Every process of these process groups now: pid to group."""
        born = self._count()
        if not self._counts or born != self._num_born or now_s - self._looked_s > FRESH_S:
            self._counts |= 0 < self._num_born < born
            self._num_born, self._looked_s = born, now_s  # both from before the look
            self._groups = _look()
        return {
            pid: group
            for group in process_groups
            for pid in self._groups.get(group, ())
            if _group_of(pid) == group
        }


def _look() -> dict[int, list[int]]:
    """The processes of every process group."""
    groups: dict[int, list[int]] = {}
    # 20 times faster than reading /proc/*/stat.
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            group = os.getpgid(pid)
        except OSError:
            continue  # the process ended while we looked
        if group in groups:
            groups[group].append(pid)
        else:
            groups[group] = [pid]
    return groups


def _group_of(pid: int) -> int:
    """Its process group; 0, which is nobody's, once it has ended."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/status", "rb", buffering=0) as status:
        # A process that has ended and is not reaped yet has no such lines, and no memory.
        return sum(int(kib) << 10 for kib in _HELD.findall(status.readall()))
