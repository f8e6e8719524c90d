"""How much memory the holders of a slab really keep: NVML where there is a GPU, the kernel's count of
resident memory where there is none. Measured, never asked.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def resident_bytes(process_groups: Iterable[int]) -> dict[int, int]:
    """Anonymous and shared-memory resident bytes of each process group, summed over its processes."""
    wanted = dict.fromkeys(process_groups, 0)
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            group = int(status.read_text().rsplit(")", 1)[1].split()[2])
            if group in wanted:
                wanted[group] += _resident(status.parent / "status")
        except (OSError, IndexError, ValueError):
            continue  # the process ended while we looked
    return wanted


def _resident(status: Path) -> int:
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    parts = (fields.get(name, "0 kB") for name in ("RssAnon", "RssShmem"))
    return sum(int(part.split()[0]) << 10 for part in parts)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What one slab's devices hold, in bytes, and which processes are on them."""

    used_bytes: int
    pids: frozenset[int]
