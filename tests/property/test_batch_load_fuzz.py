"""Damaged `batch.load` events: the reader never raises, and what it accepts can be simulated.

`YATT_FUZZ=5000 YATT_FUZZ_SEED=7 pytest tests/property/test_batch_load_fuzz.py` runs the long form. Without a
seed each run draws its own, and a failure prints it.
"""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.obs_runs import event, make_run
from tests.seeds import seed_of
from yatt.forecast.time.figures import drawn_length, mean_length
from yatt.obs.story.batch_loads import mean_lengths, read_batch_loads
from yatt.records.events.log import logged_event
from yatt.records.events.slabs import BatchMeasured

COUNT = int(os.environ.get("YATT_FUZZ", "500"))
SEED = seed_of("YATT_FUZZ_SEED")
ROLE = {"step_s": 0.02, "sequence_s": 0.001, "room": 8, "engines": 1, "slabs": 4, "idle": 0.3}
GOOD = event(
    1, "batch.load", iteration=1, seconds=12.3, num_samples=64, lengths=[float(i) for i in range(21)],
    verdicts={"genrm:judge": 30.0}, roles={"rollout": ROLE, "genrm:judge": ROLE}, switch_s=1.0, train_s=2.0,
    kept=0.8,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, -(2**70), 10**400, 0.0, -0.0, 1e308, math.inf, -math.inf, math.nan,
    "", "1", "rollout", "genrm:", "\ud800", [], [1], [[]], {}, {"rollout": ROLE}, {"": {}},
    {"genrm:x": math.nan},
)  # fmt: skip


def damaged(value: Any, numbers: random.Random) -> Any:
    """The value with one part of it replaced, removed or repeated."""
    if isinstance(value, dict) and value and numbers.random() < 0.9:
        key = numbers.choice(sorted(value))
        rest = {k: v for k, v in value.items() if k != key}
        return rest if numbers.random() < 0.2 else {**rest, key: damaged(value[key], numbers)}
    if isinstance(value, list) and value and numbers.random() < 0.7:
        at = numbers.randrange(len(value))
        return [*value[:at], damaged(value[at], numbers), *value[at + numbers.randrange(2) :]]
    return numbers.choice(VALUES)


def check(record: dict[str, Any], numbers: random.Random) -> None:
    logged = logged_event(record)
    if logged is None or not isinstance(load := logged.event, BatchMeasured):
        return
    assert 0 < load.kept <= 1
    assert math.isfinite(mean_length(mean_lengths([load])))
    assert 1 <= drawn_length(load.lengths, numbers) <= max(load.lengths[-1], 1)
    for role in load.roles.values():
        assert 0 < role.slabs_per_engine < math.inf
        assert math.isfinite((role.step_s or 0) + (role.sequence_s or 0))


@pytest.mark.timeout(900 + COUNT // 10)
def test_no_damaged_event_raises(tmp_path: Path) -> None:
    numbers = random.Random(SEED)
    records = []
    for _ in range(COUNT):
        record = GOOD
        for _ in range(numbers.randint(1, 3)):
            record = damaged(record, numbers)
        if isinstance(record, dict):
            records.append({**event(1, "batch.load"), **record})
    for record in records:
        try:
            check(record, numbers)
        except Exception as error:
            raise AssertionError((SEED, record)) from error
    paths = make_run(tmp_path, events=[GOOD])
    with open(paths.events, "a", errors="replace") as file:
        file.writelines(json.dumps(record)[: numbers.choice((None, None, 40))] + "\n" for record in records)
        file.write(json.dumps({**GOOD, "iteration": 2, "attempt": 10**9}) + "\n")
    loads, num_bad = read_batch_loads(paths.events)
    assert loads[-1].iteration == 2, SEED
    assert num_bad > COUNT / 10, SEED
