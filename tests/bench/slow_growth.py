"""How much memory each process of a long run takes more with each iteration.

A whole run, its trainer and engines scripted, so that ten thousand iterations take minutes. Memory is what a
process has by itself (RssAnon), read from /proc a hundred times; the slope is that of a straight line through
the second half, when caches and pools are as large as they get.
"""

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.runs import RunFile, command, environment, living, wait_for

ITERATIONS = int(os.environ.get("GROWTH_ITERATIONS", "10000"))
EVERY = max(1, ITERATIONS // 100)
MOST_KIB = 0.5
"""Per iteration: 50 MiB in a run of a hundred thousand."""

LIMIT_S = 120.0
KINDS = {
    "yatt.cli.main": "launcher", "yatt.control": "controller", "yatt.trainer": "trainer rank",
    "yatt.rollout": "engine", "yatt.reward": "reward process", "yatt.uploader": "uploader",
    "yatt.obs.trackers.follow": "tracker",
}  # fmt: skip


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="yatt-growth-") as folder:
        seen = _followed(Path(folder))
    slopes = {pid: (kind, *_slope(points)) for pid, (kind, points) in seen.items() if len(points) > 40}
    listed = sorted(slopes.values(), key=lambda found: -found[1])
    return {
        "title": "Slow growth",
        "how": (
            f"{ITERATIONS} iterations of 4 prompts on two nodes, scripted trainer and engines, a save every "
            "hundred iterations, tensorboard; memory of each process by itself, by a straight line through "
            "the second half."
        ),
        "head": ["process", "KiB an iteration", "MiB at the middle", "MiB at the end"],
        "rows": [[kind, f"{kib:.3f}", f"{mid:.1f}", f"{end:.1f}"] for kind, kib, mid, end in listed],
        "targets": [
            {
                "what": "the largest growth of a process in the second half",
                "target": f"<= {MOST_KIB} KiB an iteration",
                "value": f"{listed[0][1]:.3f} KiB ({listed[0][0]})", "met": listed[0][1] <= MOST_KIB,
            }
        ],
    }  # fmt: skip


def _followed(folder: Path) -> dict[int, tuple[str, list[tuple[int, int]]]]:
    """Runs to the end; gives each process's kind, and its KiB by iteration."""
    settings = {
        "run": {"deterministic": False}, "launch": {"nodes": 2, "nurseries": False},
        "trainer": {"total_iterations": ITERATIONS}, "checkpoint": {"save_every": 100, "keep": 2},
        "logging": {"trackers": ["tensorboard"]}, "model": {"trainer": "scripted"},
    }  # fmt: skip
    made, seen = RunFile(folder, settings), dict[int, tuple[str, list[tuple[int, int]]]]()
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(
            command("run", str(made.write())), env=environment(), stdout=out, stderr=out
        )
    try:
        for wanted in range(EVERY, ITERATIONS + 1, EVERY):
            wait_for(
                lambda: process.poll() is not None or _iteration(made) >= wanted,  # noqa: B023
                timeout_s=LIMIT_S, what=f"iteration {wanted}",
            )  # fmt: skip
            for pid, module in {**living(made.run_dir), process.pid: "yatt.cli.main"}.items():
                if kib := _own_kib(pid):
                    kind = KINDS.get(module, module)
                    seen.setdefault(pid, (kind, []))[1].append((wanted, kib))
        assert process.wait(LIMIT_S) == 0, (folder / "out").read_text()[-2000:]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)
    return seen


def _iteration(made: RunFile) -> int:
    """The newest iteration in the metrics; only the end of the file is read."""
    path = made.run_dir / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        lines = file.read().split(b"\n")
    whole = [line for line in lines[1:-1] if line.startswith(b"{")]
    at = b'"training/global_step":'
    return int(whole[-1].partition(at)[2].split(b",")[0].strip(b" }")) if whole else 0


def _own_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def _slope(points: list[tuple[int, int]]) -> tuple[float, float, float]:
    """KiB an iteration in the second half, and MiB at its beginning and end."""
    half = points[len(points) // 2 :]
    iterations, kib = np.array(half, dtype=np.float64).T
    slope = float(np.polyfit(iterations, kib, 1)[0])
    return slope, kib[0] / 1024, kib[-1] / 1024
