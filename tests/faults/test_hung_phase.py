"""A phase in which nothing gets on ends at its limit, although every engine lives and waits for work."""

from pathlib import Path

import pytest

from tests.runs import RunFile, rows, yatt

pytestmark = pytest.mark.faults

HANGS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(10_000)
"""


def test_idle_engines_are_no_progress(tmp_path: Path) -> None:
    """A whole run: two real nodes wait for each other. Which beats are progress is in
    `unit/control/test_progress.py`."""
    run = RunFile(tmp_path, {
        "run": {"deterministic": False, "max_attempts_without_progress": 1},
        "launch": {"nodes": 2, "phase_timeout_s": 10},
        "rewards": [{"name": "digits", "path": str(tmp_path / "reward.py"), "timeout_s": 9000}],
        "placement": {"mode": "disaggregated", "trainer_nodes": 1},
    })  # fmt: skip
    (tmp_path / "reward.py").write_text(HANGS)
    done = yatt("run", str(run.write()), timeout_s=150)
    assert done.returncode == 93, done.stdout + done.stderr
    assert "node0 did not answer Advance within 10 s" in done.stdout + done.stderr
    assert rows(run.run_dir / "events.jsonl")
