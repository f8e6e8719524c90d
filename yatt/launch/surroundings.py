"""Software and hardware of the machine that starts an attempt, recorded with the attempt for the report."""

import contextlib
import os
import platform
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from yatt import __version__
from yatt.launch.diagnose.versions import installed

ANSWER_S = 10.0
CPU_INFO = Path("/proc/cpuinfo")


def surroundings(device: str) -> dict[str, Any]:
    """Returns versions by name, the processor, cores, GiB of memory, and GPUs by name. What cannot be found
    out is missing.

    Args:
        device: `launch.device`; with cpu, no GPU is looked for.
    """
    found = installed()
    versions = {"yatt": __version__, "python": platform.python_version(), **found.packages}
    versions |= {name: each for name, each in (("cuda", found.cuda), ("driver", found.driver)) if each}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "versions": versions, "processor": _processor(), "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1), "gpus": {} if device == "cpu" else _gpus(),
    }  # fmt: skip


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in CPU_INFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> dict[str, int]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    argv = [tool, "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=ANSWER_S)
        return dict(Counter(line.strip() for line in done.stdout.splitlines() if line.strip()))
    return {}
