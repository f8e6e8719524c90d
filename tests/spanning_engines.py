"""Runs whose rollout engine spans two nodes, and what became of its ranks."""

import json
from pathlib import Path
from typing import Any

from tests.runs import RunFile, rows, wait_for

SCRIPT = {"steps_per_token": 20, "seconds_per_step": 0.002}
LEASE = {"renew_s": 0.5, "ttl_s": 10.0, "term_s": 1.0}


def scripted_run(folder: Path, *, tp_size: int = 2, iterations: int = 3, **settings: Any) -> RunFile:
    """Colocated on two nodes with one slot each; bit-equal whatever `tp_size` is."""
    rollout = {"tp_size": tp_size, **settings.pop("rollout", {})}
    run = RunFile(
        folder, {"trainer": {"total_iterations": iterations}, "lease": LEASE, "rollout": rollout, **settings}
    )
    run.write()
    (folder / "policy" / "scripted.json").write_text(json.dumps(SCRIPT))
    return run


def events(run: RunFile, *kinds: str) -> list[dict[str, Any]]:
    """The run's events so far, of these kinds if any are given."""
    return [event for event in rows(run.run_dir / "events.jsonl") if not kinds or event["kind"] in kinds]


def starts_of(run: RunFile, role: str = "rollout") -> list[str]:
    """Processes of a role's engines, with the number of the start."""
    return sorted(e["worker"] for e in events(run, "worker.start") if e["worker"].startswith(role))


def pid_of(run: RunFile, name: str, start: int = 1) -> int:
    """The process of this start of a worker, once it is awake with weights."""
    address = f"{name}.{start}"
    wait_for(
        lambda: address in {e["worker"] for e in events(run, "weights.check")},
        timeout_s=90, what=f"{address} to be awake",
    )  # fmt: skip
    return next(int(e["pid"]) for e in events(run, "worker.start") if e["worker"] == address)
