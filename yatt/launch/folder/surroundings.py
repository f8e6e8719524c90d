"""Software and hardware of the machine that starts an attempt, recorded with the attempt for the report."""

import contextlib
import os
import platform
from collections import Counter
from pathlib import Path
from typing import Any

from yatt.launch.folder.installed_versions import versions_here
from yatt.version import __version__

CPU_INFO = Path("/proc/cpuinfo")
GPUS = Path("/proc/driver/nvidia/gpus")


def describe_machine(device: str, gpus: Path = GPUS) -> dict[str, Any]:
    """Returns versions by name, the processor, cores, GiB of memory, and GPUs by name. What cannot be found
    out is missing.

    Args:
        device: `launch.node.device`; with cpu, no GPU is looked for.
        gpus: the driver's folder with a folder for each GPU.
    """
    found = versions_here()
    versions = {"yatt": __version__, "python": platform.python_version(), **found.packages}
    versions |= {name: each for name, each in (("cuda", found.cuda), ("driver", found.driver)) if each}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "versions": versions,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "gpus": {} if device == "cpu" else _gpus(gpus),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in CPU_INFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus(folder: Path) -> dict[str, int]:
    """Counts GPUs by name. Reads the driver's files: nvidia-smi may hang, and cannot be killed then."""
    names: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for file in folder.glob("*/information"):
            for line in file.read_text(errors="replace").splitlines():
                if line.startswith("Model:"):
                    names[line.partition(":")[2].strip()] += 1
    return dict(names)
