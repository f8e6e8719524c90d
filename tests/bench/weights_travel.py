"""Weights between two controllers: how fast, and whether the event loops stay awake meanwhile.

The owner's controller is a process of its own, ``python -m tests.bench.weights_travel RUN_FOLDER``, the
engine node's is this one. See tests/bench/cluster.py for what is real: here all but the weights' content.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench import cluster
from tests.tiny_models import make_scripted_model
from yatt.adapters.curve import make_keys
from yatt.adapters.files import make_private, publish, read_or_none
from yatt.adapters.host_segment import SegmentWriter, Stamp, segment_path, weight_plan_path
from yatt.config.load import load, resolved_text
from yatt.control.gpus.uploads import host_stem
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m

SIZE_BYTES = 1 << 30
REPEATS = 5
TARGET_MB_S = 200.0
MOST_LATE_S = 0.5
LOOK_S = 0.01


def prepare(root: Path, shm: Path) -> None:
    """A run folder for one trainer node and one rollout node."""
    paths = RunPaths(root)
    model = make_scripted_model(root / "model")
    data = root / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    settings = {
        "run.dir": root, "data.train_files": f"[{data}]", "model.path": model, "launch.nodes": 2,
        "launch.scratch_dir": root / "s", "launch.shm_dir": shm, "optimizer.lr": "1.0e-3",
        "rewards": "[{name: exact, path: 'builtin:exact'}]", "rollout.engine": "scripted",
        "placement.mode": "disaggregated", "placement.trainer_nodes": 1, "trainer.total_iterations": 1,
        "trainer.train_batch_size": 1, "trainer.mini_batch_size": 1,
    }  # fmt: skip
    empty = root / "empty.yaml"
    empty.write_text("{}\n")
    config = load([empty], [f"{key}={value}" for key, value in settings.items()])
    paths.config.write_text(resolved_text(config))
    make_keys(paths.keys)
    paths.attempt(cluster.ATTEMPT).mkdir(parents=True)


class Lateness:
    """How late the event loop ever came back to a task that wants to run every 10 ms."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            self.worst_s = max(self.worst_s, time.monotonic() - before_s - LOOK_S)

    def end(self) -> float:
        self._task.cancel()
        return self.worst_s


async def give(root: Path) -> None:
    """The owner: publishes, answers until SIGTERM, writes how late its loop was."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with cluster.nodes(root, range(1)) as (owner,):
        make_private(owner.node.weights_root)
        stem = host_stem(owner.node, 0)
        segment = SegmentWriter(segment_path(stem, "weights"), SIZE_BYTES)
        block = os.urandom(1 << 20)
        for begin in range(0, SIZE_BYTES, len(block)):
            segment.data[begin : begin + len(block)] = block
        segment.complete(Stamp(cluster.ATTEMPT, 1))
        weight_plan_path(stem).write_bytes(b"")
        lateness = Lateness()
        publish(root / "ready", b"1")
        await stop.wait()
        publish(root / "lateness", f"{lateness.end()}".encode())


async def take(root: Path) -> dict[str, Any]:
    """The engine node: fetches again and again; seconds of each, and how late its loop was."""
    async with cluster.nodes(root, range(1, 2)) as (taker,):
        taker.dial(0, await cluster.address_of(root, 0))
        make_private(taker.node.weights_root)
        while read_or_none(root / "ready") is None:
            await asyncio.sleep(0.05)
        lateness, taken_s = Lateness(), []
        order = c.TakeWeights(policy_version=1, probe=(), probe_logprobs=(), rounding=0.0, sums={})
        for _ in range(REPEATS):
            began_s = time.monotonic()
            answer = await taker.controller.handle("node0", order)
            taken_s.append(time.monotonic() - began_s)
            assert isinstance(answer, m.Done), answer
            taker.parts.publications.newest = None
        return {"taken_s": taken_s, "taker_late_s": lateness.end()}


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="yatt-", dir="/dev/shm")))
        prepare(root, shm)
        owner = subprocess.Popen([sys.executable, "-m", "tests.bench.weights_travel", folder])
        try:
            seen = asyncio.run(take(root))
        finally:
            owner.terminate()
            owner.wait(timeout=60)
        return {**seen, "owner_late_s": float((root / "lateness").read_text())}


def copied_s() -> float:
    """Seconds that a copy of the same bytes within the memory filesystem takes."""
    with tempfile.TemporaryDirectory(prefix="yatt-", dir="/dev/shm") as folder:
        source = Path(folder) / "a"
        source.write_bytes(os.urandom(1 << 20) * (SIZE_BYTES >> 20))
        began_s = time.monotonic()
        shutil.copyfile(source, Path(folder) / "b")
        return time.monotonic() - began_s


def run() -> dict[str, Any]:
    size_mb = SIZE_BYTES / 1e6
    copy_s, seen = copied_s(), measure()
    times = sorted(seen["taken_s"])
    middle = size_mb / times[len(times) // 2]
    late_s = max(seen["owner_late_s"], seen["taker_late_s"])
    rows = [
        ["fetch, median", f"{times[len(times) // 2]:.2f} s", f"{middle:.0f} MB/s"],
        ["fetch, slowest", f"{times[-1]:.2f} s", f"{size_mb / times[-1]:.0f} MB/s"],
        ["copy within the memory filesystem", f"{copy_s:.2f} s", f"{size_mb / copy_s:.0f} MB/s"],
    ]
    return {
        "title": "Weights between two controllers",
        "how": f"A segment of {SIZE_BYTES >> 20} MiB from a trainer node's memory filesystem to that of an "
        f"engine node: real controllers in two processes, CURVE over TCP on the loopback. {REPEATS} fetches. "
        "Lateness is of a task that wants to run every 10 ms.",
        "head": ["what", "time", "rate"],
        "rows": rows,
        "targets": [
            {"what": "fetch, median", "target": f">= {TARGET_MB_S:.0f} MB/s", "value": f"{middle:.0f} MB/s",
             "met": middle >= TARGET_MB_S},
            {"what": "latest either event loop came back", "target": f"<= {MOST_LATE_S:g} s",
             "value": f"{late_s:.3f} s", "met": late_s <= MOST_LATE_S},
        ],
    }  # fmt: skip


if __name__ == "__main__":
    asyncio.run(give(Path(sys.argv[1])))
