"""How many files of its Python environment one node opens at a start, with and without `stage.environment`.

One node of a real Slurm with a real trainer rank and a real vLLM engine, for one iteration. All that slurmd
starts is traced by strace: the launcher, which runs once a job, the node's step, the controller and workers.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.runs import HANG_S, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SubmittedRun
from tests.small_environments import pack

SETTINGS: dict[str, Any] = {
    "launch": {"nodes": 1}, "placement": {"mode": "colocated", "trainer_nodes": 0},
    "trainer": {"total_iterations": 1}, "model": {"trainer": "megatron"}, "rollout": {"engine": "vllm"},
}  # fmt: skip
FEWER = 10.0


def run() -> dict[str, Any]:
    if shutil.which("strace") is None:
        sys.exit("this benchmark needs strace")
    with tempfile.TemporaryDirectory(prefix="yatt-opens-") as folder:
        place, began_s = Path(folder), time.monotonic()
        archive = pack(Path(sys.prefix), place / "environment.tar")
        packed_s = time.monotonic() - began_s
        (place / "disk").mkdir()
        stage = {"folder": str(place / "disk"), "environment": str(archive), "limit_s": 1800}
        arms = {"original": {}, "first start": {"stage": stage}, "next start": {"stage": stage}}
        found = {name: _opens(place / name.replace(" ", "-"), arm) for name, arm in arms.items()}
        size = archive.stat().st_size
    before, after = found["original"], found["next start"]
    return {
        "title": "Opens of the Python environment at a start",
        "how": (
            "One node of a real Slurm (virtual, on this machine), one trainer rank, one vLLM engine, one "
            "iteration; successful opens below the environment's folder, by strace of all that slurmd "
            "starts. "
            f"The archive has {size / 1e9:.1f} GB and took {packed_s:.0f} s to pack."
        ),
        "head": ["start", "opens of the original", "of them by launcher and step"],
        "rows": [[name, f"{whole:,}", f"{own:,}"] for name, (whole, own) in found.items()],
        "targets": [
            {
                "what": "opens of the original, with against without the copy", "target": f"<= 1/{FEWER:g}",
                "value": f"1/{before[0] / max(after[0], 1):.1f}", "met": after[0] * FEWER <= before[0],
            }
        ],
    }  # fmt: skip


def _opens(folder: Path, site: dict[str, Any]) -> tuple[int, int]:
    """Opens below `sys.prefix` in a run of one iteration: all, and those of the launcher and the step."""
    trace, cluster = folder.with_suffix(".trace"), Cluster(NODES=1)
    try:
        cluster.up()
        with _traced(_slurmd(cluster), trace):
            job = SubmittedRun(cluster, folder, SETTINGS, **site, python=sys.executable)
            job.wait_finished(job.submit())
        return _counted(trace)
    finally:
        cluster.down()


def _slurmd(cluster: Cluster) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words, env = path.read_bytes().split(b"\0"), (path.parent / "environ").read_bytes()
        except OSError:
            continue
        named = b"\0".join(words) + env
        if Path(os.fsdecode(words[0])).name == "slurmd" and os.fsencode(cluster.root) in named:
            return int(path.parent.name)
    raise AssertionError("the cluster has no slurmd")


class _traced:
    def __init__(self, pid: int, trace: Path) -> None:
        self._argv = ["strace", "-f", "-q", "-s", "300", "-e", "trace=open,openat,execve,clone,clone3,vfork"]
        self._argv += ["-e", "signal=none", "-o", str(trace), "-p", str(pid)]

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._argv)
        pid = self._process.pid
        wait_for(lambda: f"TracerPid:\t{pid}" in self._status(), timeout_s=HANG_S, what="strace")

    def _status(self) -> str:
        return Path(f"/proc/{self._argv[-1]}/status").read_text()

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()


def _counted(trace: Path) -> tuple[int, int]:
    """A process is what its last execve said, or what its parent is."""
    program, whole, own = dict[str, str](), 0, 0
    opened = re.compile(rf'(\d+)\s+open(?:at)?\(.*?"{re.escape(sys.prefix)}/[^"]*".*= \d+')
    begun = re.compile(r"(\d+)\s+(?:clone3?|vfork)\(.*= (\d+)$")
    unfinished = re.compile(r"(\d+)\s+<\.\.\. (?:clone3?|vfork) resumed>.*= (\d+)$")
    started = re.compile(r"(\d+)\s+execve\((.*)")
    with trace.open(errors="replace") as lines:
        for line in lines:
            line = line.rstrip()
            if match := opened.match(line):
                whole += 1
                own += program.get(match[1], "") in ("batch", "step")
            elif match := begun.match(line) or unfinished.match(line):
                program[match[2]] = program.get(match[1], "")
            elif match := started.match(line):
                found = re.search(r'"yatt\.launch\.(batch|step)"', match[2])
                program[match[1]] = found[1] if found else ""
    return whole, own
