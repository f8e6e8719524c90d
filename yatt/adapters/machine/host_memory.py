"""Host memory: how much is in use, how much this process may still use; the size of a model's weights."""

from pathlib import Path

MEMINFO, CGROUPS, OWN = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of a control group: the limit, and what is used; of version 2 and of version 1."""


def available_bytes(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """Returns the bytes that are available: on the machine, and in each control group around this process (a
    job's memory on Slurm). Page cache counts as available.

    Raises:
        OSError: the kernel does not say what the machine has.
    """
    return min([_of_machine("MemAvailable:", meminfo), *_left_in_groups(cgroups, own)])


def used_bytes(meminfo: Path = MEMINFO) -> int:
    """Returns the bytes of the machine's memory that are in use, by all processes. Page cache is not.

    Raises:
        OSError: the kernel does not say what the machine has.
    """
    return _of_machine("MemTotal:", meminfo) - _of_machine("MemAvailable:", meminfo)


def _of_machine(name: str, meminfo: Path) -> int:
    lines = meminfo.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _left_in_groups(cgroups: Path, own: Path) -> list[int]:
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if not controllers or "memory" in controllers.split(","):
            top = cgroups / "memory" if controllers else cgroups
            inner = top / path.lstrip("/")
            found += [left for folder in (inner, *inner.parents) if (left := _left_in(folder)) is not None]
    return found


def _left_in(folder: Path) -> int | None:
    for limit, used in _LIMITS:
        try:
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            return max(left + _cached_in(folder), 0)
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return None


def _cached_in(folder: Path) -> int:
    """Bytes of files that the group has read or written, and that the kernel drops when memory is needed."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    names = ("inactive_file", "active_file")
    return sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in names)


def weights_bytes(folder: str) -> int:
    """Returns the bytes of the safetensors files of a model folder.

    Raises:
        OSError: it cannot be read.
    """
    return sum(path.stat().st_size for path in Path(folder).iterdir() if path.suffix == ".safetensors")
