"""Oversampling in a whole run: long completions are cut and continue, and every token is trained on once."""

from pathlib import Path

import pytest

from tests.bench.oversampling import balance_of, run_of
from tests.runs import rows, yatt

ITERATIONS = 8
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_no_token_is_lost_or_made_twice(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1.25, ITERATIONS, seconds_per_step=0.002)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    found = balance_of(run)
    assert found.sampled == found.trained + found.left
    assert (found.restarted, max(found.ages)) == (0, 1), "groups were cut, and none of them twice"
    assert found.unfinished, "the last iteration has cut some too"
    events = rows(run.run_dir / "events.jsonl")
    opened = [n for event in events if event["kind"] == "rollout.group.open" for n in event["numbers"]]
    accepted = [event["number"] for event in events if event["kind"] == "rollout.group.accept"]
    assert len(set(accepted)) == len(accepted) and set(accepted) <= set(opened)
    assert opened == list(range(len(opened)))
