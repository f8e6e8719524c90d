"""How much of the machine others used while something was measured.

A comparison of a program with one process of two threads and one with several of one thread means nothing
on a busy machine: two threads that meet at every barrier wait for whichever was pushed aside.
"""

import os
import resource
import time
from pathlib import Path

MOST_FOREIGN = 0.15
"""Share of the cores that others may use in a valid measurement."""


class Foreign:
    """Watches from its making until `share` is asked for; counts our children once they are reaped."""

    def __init__(self) -> None:
        self._began = (time.monotonic(), _busy_s(), _own_s())

    def share(self) -> float:
        wall_s, busy_s, own_s = (
            now - before
            for now, before in zip((time.monotonic(), _busy_s(), _own_s()), self._began, strict=True)
        )
        return max(0.0, busy_s - own_s) / (wall_s * len(os.sched_getaffinity(0)))


def _busy_s() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
