"""CPUs that a process may use, and CPUs near a GPU, by the kernel's numbers."""

import os
from collections.abc import Iterable
from pathlib import Path

SYS = Path("/sys")


def own_cpus() -> frozenset[int]:
    """Returns the CPUs that this process and its children may use."""
    return frozenset(os.sched_getaffinity(0))


def cpus_near(bus_id: str, sys: Path = SYS) -> frozenset[int]:
    """Returns the CPUs of a PCI device's NUMA node; empty if the kernel does not report them.

    Args:
        bus_id: in the kernel's form: 0000:65:00.0.
    """
    try:
        return parse_cpus(sys.joinpath("bus/pci/devices", bus_id, "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """Parses the kernel's list format: ``0-3,8``.

    Raises:
        ValueError: the text is not such a list.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpus_text(cpus: Iterable[int]) -> str:
    """Formats CPUs in the kernel's list format."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
