"""Which CPUs a process may run on, and which of them are near a GPU. Numbers are the kernel's."""

import os
from collections.abc import Iterable
from pathlib import Path

SYS = Path("/sys")


def own_cpus() -> frozenset[int]:
    """The CPUs that this process may run on, and so what it starts."""
    return frozenset(os.sched_getaffinity(0))


def cpus_near(bus_id: str, sys: Path = SYS) -> frozenset[int]:
    """The CPUs of the NUMA node that a PCI device hangs on; empty if the kernel does not say.

    Args:
        bus_id: as the kernel writes it: 0000:65:00.0.
    """
    try:
        return parse(sys.joinpath("bus/pci/devices", bus_id, "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse(text: str) -> frozenset[int]:
    """The kernel's lists: ``0-3,8``.

    Raises:
        ValueError: it is no such list.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def shown(cpus: Iterable[int]) -> str:
    """As the kernel would write them."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
