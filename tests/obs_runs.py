"""Run folders written by hand, for tests of what looks at them."""

import json
from datetime import UTC, datetime
from pathlib import Path

import yaml

from yatt.obs.metrics import STEP
from yatt.paths import RunPaths
from yatt.records.events.log import LoggedEvent, logged_event

BEGAN_S = 1_800_000_000


def logged(*records: dict) -> list[LoggedEvent]:
    """Lines of a log as events; none is damaged."""
    found = [each for each in map(logged_event, records) if each is not None]
    assert len(found) == len(records), records
    return found


def event(at_s: float, kind: str, *, attempt: int = 1, node: int = 0, **fields) -> dict:
    """One event, `at_s` seconds after the run began."""
    wall = datetime.fromtimestamp(BEGAN_S + at_s, UTC).isoformat(timespec="milliseconds")
    return {"t": int(at_s * 1e9), "wall": wall, "attempt": attempt, "node": node, "kind": kind, **fields}


def metrics(count: int) -> tuple[dict, ...]:
    """Rows of the iterations 1 to `count`."""
    return tuple(
        {STEP: step, "critic/rewards/mean": step / 10, "timing_s/step": 1.0, "genrm/judge/asked": 8.0,
         "genrm/judge/unparsable": 2.0, "perf/throughput": 100.0, "perf/total_num_tokens": 50}
        for step in range(1, count + 1)
    )  # fmt: skip


def make_run(folder: Path, *, events=(), rows=(), samples=(), **sections) -> RunPaths:
    """A run folder with a resolved config and these lines."""
    root = folder / "run"
    root.mkdir()
    config = {
        "run": {"dir": str(root)},
        "data": {"train_files": ["unused.jsonl"]},
        "model": {"path": "/models/policy"},
        "optimizer": {"lr": 0.001},
        "trainer": {"total_iterations": 24, "train_batch_size": 2, "mini_batch_size": 2},
        "rewards": [{"name": "exact", "path": "builtin:exact"}],
        **sections,
    }
    paths = RunPaths(root)
    paths.config.write_text(yaml.safe_dump(config))
    for path, lines in ((paths.events, events), (paths.metrics, rows), (paths.samples, samples)):
        if lines:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths
