"""How long a person waits for the command line, and a controller for its imports."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

REPEATS = 15
TARGET_S = 0.3
CASES: dict[str, list[str]] = {
    "python -c pass": ["-c", "pass"],
    "yatt --help": ["-m", "yatt.cli.main", "--help"],
    "import yatt.control.__main__ (a controller)": ["-c", "import yatt.control.__main__"],
    "import torch, for comparison": ["-c", "import torch"],
}


def seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def run() -> dict[str, Any]:
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for repeat in range(REPEATS + 1):  # the first fills the file cache and is discarded
        for name, arguments in CASES.items():
            if name.startswith("import torch") and repeat > 3:
                continue
            argv = [sys.executable, *arguments]
            took = seconds(lambda argv=argv: subprocess.run(argv, capture_output=True, check=True))  # type: ignore[misc]
            if repeat:
                taken[name].append(took)
    help_s = statistics.median(taken["yatt --help"])
    return {
        "title": "Start of the command line",
        "how": f"Wall time of a whole process, {REPEATS} repeats in turn, files cached.",
        "head": ["process", "median", "slowest"],
        "rows": [
            [name, f"{statistics.median(times):.3f} s", f"{max(times):.3f} s"]
            for name, times in taken.items()
        ],
        "targets": [{
            "what": "yatt --help, median", "target": f"<= {TARGET_S} s",
            "value": f"{help_s:.3f} s", "met": help_s <= TARGET_S,
        }],
    }  # fmt: skip
