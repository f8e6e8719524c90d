"""How much memory process groups really keep, by the kernel's count. Measured, never asked."""

from collections.abc import Iterable
from pathlib import Path


def resident_bytes(process_groups: Iterable[int]) -> dict[int, int]:
    """Anonymous and shared-memory resident bytes of each process group, summed over its processes."""
    held = dict.fromkeys(process_groups, 0)
    for pid, group in members(held).items():
        try:
            held[group] += _resident(Path(f"/proc/{pid}/status"))
        except (OSError, IndexError, ValueError):
            continue  # the process ended while we looked
    return held


def members(process_groups: Iterable[int]) -> dict[int, int]:
    """Every process of these process groups now: pid to group."""
    wanted, found = frozenset(process_groups), dict[int, int]()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            group = int(status.read_text().rsplit(")", 1)[1].split()[2])
        except (OSError, IndexError, ValueError):
            continue  # the process ended while we looked
        if group in wanted:
            found[int(status.parent.name)] = group
    return found


def _resident(status: Path) -> int:
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    parts = (fields.get(name, "0 kB") for name in ("RssAnon", "RssShmem"))
    return sum(int(part.split()[0]) << 10 for part in parts)
