"""What one phase switch costs beside the workers' own sleep and wake: see tests/bench/cluster.py."""

import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench import cluster
from tests.bench.bare_rounds import pair_seconds
from tests.tiny_models import make_scripted_model
from yatt.adapters.net.curve import make_keys
from yatt.config.load import load_run_config, resolved_text
from yatt.paths import RunPaths

SIZES = (2, 64)
BUSY_SIZE = 64
STARTER = "import subprocess, time\nwhile True:\n    subprocess.run(['/bin/true'])\n    time.sleep(0.01)"
"""Something else that starts processes all the time: then no look at all processes is used twice."""

SWITCHES = 200
WARM_UP = 10
MOST_PROCESSES = 2
TARGET_S = 0.05
PHASES = {"train": "rollout engine to trainer", "sync": "trainer to rollout engine", "publish": "same holder"}


def prepare(root: Path, num_nodes: int, iterations: int = SWITCHES // 2 + WARM_UP, **more: Any) -> None:
    """A run folder: config with `more` settings, keys, folders."""
    paths = RunPaths(root)
    model = make_scripted_model(root / "model")
    data = root / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    settings = {
        "run.dir": root, "data.train_files": f"[{data}]", "model.path": model, "model.dtype": "float32",
        "launch.nodes": num_nodes, "launch.scratch_dir": root / "s", "optimizer.lr": "1.0e-3",
        "lease.ttl_s": "600",  # the stand-ins of workers renew nothing
        "rewards": "[{name: exact, path: 'builtin:exact'}]", "rollout.engine": "scripted",
        "trainer.total_iterations": iterations, "trainer.train_batch_size": num_nodes,
        "trainer.mini_batch_size": num_nodes, **more,
    }  # fmt: skip
    empty = root / "empty.yaml"
    empty.write_text("{}\n")
    config = load_run_config([empty], [f"{key}={value}" for key, value in settings.items()])
    paths.config.write_text(resolved_text(config))
    make_keys(paths.keys)
    paths.attempt(cluster.ATTEMPT).mkdir(parents=True)


def shares(num_nodes: int) -> list[range]:
    """Which nodes share a process."""
    num_processes = min(MOST_PROCESSES, num_nodes - 1)
    bounds = [1 + (num_nodes - 1) * index // num_processes for index in range(num_processes + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def start(root: Path, share: range) -> subprocess.Popen:
    argv = [sys.executable, "-m", "tests.bench.cluster", str(root), str(share[0]), str(share[-1])]
    with (root / f"nodes-{share[0]}.log").open("wb") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log)


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(timeout=60)


@contextmanager
def starting_processes(is_busy: bool) -> Iterator[None]:
    """Somebody else starts processes on this machine all the while, if `is_busy`."""
    starters = [subprocess.Popen([sys.executable, "-c", STARTER])] if is_busy else []
    try:
        yield
    finally:
        end(starters)


def measure(num_nodes: int, *, is_busy: bool = False) -> dict[str, Any]:
    """Seconds of each switch by phase and of bare rounds; CPU seconds of leader and followers an iteration.

    `is_busy`: others start processes on this machine all the while.
    """
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
        root = Path(folder)
        prepare(root, num_nodes)
        with starting_processes(is_busy):
            bare_s = pair_seconds(root, shares(num_nodes), SWITCHES)
            started = [start(root, share) for share in shares(num_nodes)]
            try:
                leader_cpu_s = asyncio.run(cluster.lead(root, num_nodes))
            finally:
                end(started)
        taken = defaultdict(list)
        for line in RunPaths(root).events.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "phase.end" and event["iteration"] > WARM_UP:
                taken[event["phase"]].append(event["seconds"])
        followers_cpu_s = sum(float(path.read_text()) for path in root.glob("cpu-*"))
    iterations = SWITCHES // 2 + WARM_UP
    return {
        "taken": dict(taken),
        "bare": bare_s,
        "leader_cpu_s": leader_cpu_s / iterations,
        "follower_cpu_s": followers_cpu_s / iterations / (num_nodes - 1),
    }


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def costs(nodes: str, seen: dict[str, Any], switch_s: float) -> str:
    """CPU of an iteration, and a switch against the yardstick."""
    bare_s, bare_p99_s = quantile(seen["bare"], 0.5), quantile(seen["bare"], 0.99)
    return (
        f"{nodes}: one iteration (two switches of holder, two of none) takes "
        f"{seen['leader_cpu_s'] * 1e3:.1f} ms of CPU in the leader's process and "
        f"{seen['follower_cpu_s'] * 1e3:.2f} ms in each other controller's; here all of these share the "
        "machine's cores, on a cluster each node has its own. Two rounds of a frame to each node and its "
        f"answer over bare libzmq, with no code of ours: p50 {bare_s * 1e3:.1f} ms, p99 "
        f"{bare_p99_s * 1e3:.1f} ms. A switch takes {switch_s / bare_s:.1f} times that (p50)."
    )


def run() -> dict[str, Any]:
    rows, targets, notes = [], [], []
    for num_nodes, is_busy in (*((size, False) for size in SIZES), (BUSY_SIZE, True)):
        nodes = f"{num_nodes} nodes{', others start processes' if is_busy else ''}"
        seen = measure(num_nodes, is_busy=is_busy)
        for phase, what in PHASES.items():
            times = seen["taken"][phase]
            p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
            rows.append([nodes, what, f"{len(times)}", f"{p50 * 1e3:.1f} ms", f"{p99 * 1e3:.1f} ms"])
        both = seen["taken"]["train"] + seen["taken"]["sync"]
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            value = quantile(both, share)
            targets.append({
                "what": f"switch over {nodes}, {name}", "target": f"<= {TARGET_S * 1e3:.0f} ms",
                "value": f"{value * 1e3:.1f} ms", "met": value <= TARGET_S,
            })  # fmt: skip
        notes.append(costs(nodes, seen, quantile(both, 0.5)))
    notes.append(
        "Left out: each node tells every trainer node how many requests its engines take, at each sleep and "
        "wake. A controller of 64 handles 126 such messages beside a switch; 64 simulated ones on two "
        "processes would handle 8,064."
    )
    notes.append(
        "Where nothing is started, most measurements of memory use the last look at the machine's processes "
        '(adr/0016). With "others start processes", a hundred a second, hardly any does.'
    )
    return {
        "title": "One phase switch",
        "how": "Two-phase over all nodes: PREPARE on all (the old holders asleep, memory measured), then "
        "ENTER on all (the new holders awake). Real coordinator, CURVE sockets over "
        "TCP, controllers and arbiters; the workers answer at once, so this is the overhead alone. The "
        f"leader has a process, all other controllers share {MOST_PROCESSES} more.",
        "head": ["nodes", "switch", "samples", "p50", "p99"],
        "rows": rows,
        "targets": targets,
        "notes": notes,
    }
