"""A run that is killed at random moments ends bit-equal in each placement, while saves are in flight.

By default three kills in one placement, which is drawn; with `YATT_KILLS=14` (`make soak`), so many in
each. tests/faults/test_resume_exact.py kills a colocated run without a GenRM.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_lost_nodes import run_file
from tests.faults.test_resume_exact import final_state, finish_under_fire, metrics
from tests.runs import RunFile, living, yatt
from tests.seeds import seed_of
from yatt.adapters.files.files import temporary_files

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

PLACEMENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "partial": (2, {"mode": "partial", "genrm_gpu_sets": 1}),
    "disaggregated": (5, {"mode": "disaggregated", "trainer_nodes": 2, "genrm_gpu_sets": 1}),
    "colocated": (2, {"mode": "colocated"}),
}
KILLS = int(os.environ.get("YATT_KILLS", "3"))
SEED = seed_of("YATT_KILLS_SEED")
CHOSEN = PLACEMENTS if KILLS > 3 else (list(PLACEMENTS)[SEED % len(PLACEMENTS)],)


def placed(folder: Path, name: str) -> RunFile:
    """Its saves take about a second, so that kills come while they are in flight."""
    nodes, placement = PLACEMENTS[name]
    run = run_file(folder, nodes, placement)
    run.settings["run"] = {"max_attempts_without_progress": 50}
    run.settings["trainer"] = {"total_iterations": 10 + 12 * KILLS}
    run.settings["checkpoint"] = {"max_bytes_per_s": 200_000}
    return run


@pytest.mark.parametrize("name", CHOSEN)
def test_kills_change_nothing(tmp_path: Path, name: str) -> None:
    calm, disturbed = placed(tmp_path / "calm", name), placed(tmp_path / "disturbed", name)
    done = yatt("run", str(calm.write()), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    hits = finish_under_fire(disturbed, KILLS, seed=SEED, settle_s=(0.1, 3.0))
    assert len(hits) >= KILLS, f"only {hits}"
    assert final_state(disturbed) == final_state(calm), hits
    assert metrics(disturbed) == metrics(calm), hits
    assert living(disturbed.run_dir) == {}
    assert disturbed.leftovers() == [], "sockets, journals or weights of dead attempts"
    assert temporary_files(disturbed.run_dir) == [], "files half written"
