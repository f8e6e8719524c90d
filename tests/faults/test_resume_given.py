"""A run with given completions that is killed at any moment ends bit-equal to one that never was."""

from pathlib import Path

import pytest

from tests.faults.test_resume_exact import final_state, finish_under_fire, metrics
from tests.given_runs import GivenRunFile
from tests.runs import yatt

pytestmark = [pytest.mark.faults, pytest.mark.slow]
NUM_KILLS, ITERATIONS = 3, 100
VICTIMS = ("yatt.control", "yatt.trainer", "yatt.uploader", "everything")


def test_kills_change_nothing(tmp_path: Path) -> None:
    """A whole run: launcher, controllers, ranks and uploader without any engine. Of dpo, which has all that
    the other kinds have and a reference model."""
    settings = {
        "run": {"max_attempts_without_progress": 20},
        "trainer": {"total_iterations": ITERATIONS},
        "checkpoint": {"save_every": 10},
        "validation": {"every": 4, "max_prompts": 9},
    }
    calm, disturbed = (GivenRunFile(tmp_path / name, "dpo", settings) for name in ("calm", "disturbed"))
    done = yatt("run", str(calm.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    hits = finish_under_fire(disturbed, NUM_KILLS, seed=2, settle_s=(0.1, 1.5), victims=VICTIMS)
    assert hits, "nothing was killed"
    found = metrics(calm)
    assert [row["training/global_step"] for row in found] == list(range(ITERATIONS + 1))
    assert all("train/loss" in row for row in found[1:])
    measured = [row["training/global_step"] for row in found if "val/loss" in row]
    assert measured == [*range(0, ITERATIONS + 1, 4)]
    assert metrics(disturbed) == found
    assert final_state(disturbed) == final_state(calm)
