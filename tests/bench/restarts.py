"""How soon a run goes on after one of its workers was killed, with nurseries (adr/0028) and without.

One run with the real vLLM and the real trainer; each worker is killed in turn. With nurseries and without, in
one quarter of an hour on one machine, so the ratio counts and not the seconds.
"""

import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runs import RunFile, command, environment, kill, rows, wait_for

REPETITIONS = int(os.environ.get("RESTART_REPETITIONS", "5"))
TARGETS = {"vLLM engine": 1 / 3, "trainer rank": 1 / 3}
LIMIT_S = 180.0
WORKERS = {"vLLM engine": "rollout-", "trainer rank": "trainer-"}


def run() -> dict[str, Any]:
    taken = {name: {is_forked: [] for is_forked in (True, False)} for name in (*WORKERS, "reward process")}
    for is_forked in (True, False):
        with tempfile.TemporaryDirectory(prefix="yatt-restarts-") as folder:
            for name, times in _drill(Path(folder), nurseries=is_forked).items():
                taken[name][is_forked] = times
    medians = {name: {k: statistics.median(v) for k, v in each.items()} for name, each in taken.items()}
    return {
        "title": "Workers that are killed",
        "how": (
            f"One run of one node, vLLM on CPU, a tiny policy, {REPETITIONS} kills each. From SIGKILL to two "
            "more iterations; of a reward process to its next one's start. A trainer rank costs the attempt, "
            "and nurseries end with it, so the next one's import the libraries again."
        ),
        "head": ["worker", "with nurseries", "all", "without", "all", "ratio"],
        "rows": [
            [
                name, f"{medians[name][True]:.1f} s", _listed(each[True]), f"{medians[name][False]:.1f} s",
                _listed(each[False]), f"{medians[name][True] / medians[name][False]:.2f}",
            ]
            for name, each in taken.items()
        ],
        "targets": [
            {
                "what": f"{name}: with nurseries by without", "target": f"<= {most:.2f}",
                "value": f"{medians[name][True] / medians[name][False]:.2f}",
                "met": medians[name][True] / medians[name][False] <= most,
            }
            for name, most in TARGETS.items()
        ],
    }  # fmt: skip


def _listed(times: list[float]) -> str:
    return ", ".join(f"{each:.1f}" for each in times)


def _drill(folder: Path, *, nurseries: bool) -> dict[str, list[float]]:
    settings = {
        "run": {"deterministic": False, "max_attempts_without_progress": 50},
        "launch": {"nodes": 1, "nurseries": nurseries},
        "rollout": {"engine": "vllm", "kv_cache_bytes": 1 << 26},
        "trainer": {"total_iterations": 100_000},
    }
    made = RunFile(folder, settings)
    argv = command("run", str(made.write()))
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(argv, env=environment(), stdout=out, stderr=out)
    try:
        _wait_iterations(made, 4)
        if nurseries:
            wait_for(lambda: _engines_can_be_forked(made), timeout_s=LIMIT_S, what="the engines' nursery")
        return {
            **{
                name: [_until_two_more(made, begin) for _ in range(REPETITIONS)]
                for name, begin in WORKERS.items()
            },
            "reward process": [_until_next(made, "reward-") for _ in range(REPETITIONS)],
        }
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def _iteration(made: RunFile) -> int:
    return max((row["training/global_step"] for row in rows(made.run_dir / "metrics.jsonl")), default=0)


def _wait_iterations(made: RunFile, number: int) -> None:
    wait_for(lambda: _iteration(made) >= number, timeout_s=LIMIT_S, what=f"iteration {number}")


def _engines_can_be_forked(made: RunFile) -> bool:
    """A single trainer rank has no nursery: it is not started again in its attempt."""
    events = rows(made.run_dir / "events.jsonl")
    return any(e["kind"] == "nursery.ready" and "vllm" in e["nursery"] for e in events)


def _starts(made: RunFile, begin: str) -> list[int]:
    events = rows(made.run_dir / "events.jsonl")
    return [e["pid"] for e in events if e["kind"] == "worker.start" and e["worker"].startswith(begin)]


def _killed(made: RunFile, begin: str) -> float:
    """Kills the newest process of a worker; returns when."""
    pid = _starts(made, begin)[-1]
    before_s = time.monotonic()
    assert kill(pid), f"{begin} is alive"
    return before_s


def _until_two_more(made: RunFile, begin: str) -> float:
    """From a kill to the second iteration after it."""
    _wait_iterations(made, _iteration(made) + 2)
    before_s, before = _killed(made, begin), _iteration(made)
    _wait_iterations(made, before + 2)
    return time.monotonic() - before_s


def _until_next(made: RunFile, begin: str) -> float:
    """From a kill to the start of the next process."""
    _wait_iterations(made, _iteration(made) + 1)
    known = len(_starts(made, begin))
    before_s = _killed(made, begin)
    is_there: Callable[[], bool] = lambda: len(_starts(made, begin)) > known  # noqa: E731
    wait_for(is_there, timeout_s=LIMIT_S, what="the next process")
    return time.monotonic() - before_s
