"""Damaged events about slabs: no inspection of a run fails, and what is drawn is finite and escaped.

`YATT_FUZZ=5000 YATT_FUZZ_SEED=7 pytest tests/property/test_slab_events_fuzz.py` runs the long form.
"""

import json
import os
import random
import re
from pathlib import Path

import pytest

from tests.obs_runs import make_run
from tests.property.test_batch_load_fuzz import damaged
from tests.seeds import seed_of
from tests.slab_runs import MOVING
from yatt.cli.commands.look import status
from yatt.obs.page.report import write_report

COUNT = int(os.environ.get("YATT_FUZZ", "500"))
SEED = seed_of("YATT_FUZZ_SEED")
KINDS = ("batch.load", "split.choose", "slab.move", "slab.moved", "engine.unfit")
EACH = 50
"""Damaged events of one run."""

OUTSIDE = re.compile(r"[\"> ](?:nan|-?inf)[\"< ,]|<script", re.IGNORECASE)


@pytest.mark.timeout(900 + COUNT // 10)
def test_no_damaged_event_about_slabs_stops_a_look_at_the_run(tmp_path: Path, capsys) -> None:
    numbers = random.Random(SEED)
    whole = [each for each in MOVING if each["kind"] in KINDS]
    for turn in range(max(1, COUNT // EACH)):
        lines = []
        for _ in range(EACH):
            record = numbers.choice(whole)
            stamps = {key: record[key] for key in ("kind", "attempt", "wall", "t", "node")}
            for _ in range(numbers.randint(1, 3)):
                record = damaged(record, numbers)
            if isinstance(record, dict):
                lines.append({**record, **(stamps if numbers.random() < 0.9 else {})})
        folder = tmp_path / str(turn)
        folder.mkdir()
        events = [*MOVING, *lines]
        numbers.shuffle(events)
        paths = make_run(folder)
        paths.events.write_text("".join(json.dumps(each) + "\n" for each in events))
        try:
            page = write_report(paths, None).read_text()
            assert status(paths.root, as_json=True) == 0 and status(paths.root, as_json=False) == 0
        except Exception as error:
            raise AssertionError((SEED, turn)) from error
        section = page.partition("<h2>GPU sets</h2>")[2].partition("<h2>Timeline</h2>")[0]
        assert "genrm:judge" in section and OUTSIDE.search(section) is None, (SEED, turn)
        json.loads(capsys.readouterr().out.splitlines()[0])
