"""A run that was stopped goes on whatever happened to its files for people.

Two damages, drawn, in each of the seven files at once; `YATT_DAMAGES=all` takes every damage.
"""

import json
import os
import random
import shutil
import signal

import pytest

from tests.damage import DAMAGES, a_folder, removed
from tests.runs import RunFile, rows, start, wait_for, yatt
from tests.seeds import seed_of
from yatt.errors import EXIT_FINISHED, EXIT_WILL_CONTINUE
from yatt.paths import RunPaths

SEED = seed_of("YATT_DAMAGES_SEED")
CHOSEN = DAMAGES if os.environ.get("YATT_DAMAGES") == "all" else tuple(random.Random(SEED).sample(DAMAGES, 2))
ITERATIONS = 6


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped in the middle, and a copy of its folder."""
    file = RunFile(
        tmp_path_factory.mktemp("damaged"),
        settings={
            "launch": {"nodes": 1},
            "trainer": {"total_iterations": ITERATIONS},
            "checkpoint": {"keep": 2},
        },
    )
    path = file.write()
    run = start("run", str(path))
    wait_for(lambda: len(rows(file.run_dir / "metrics.jsonl")) >= 2, timeout_s=90, what="two iterations")
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == EXIT_WILL_CONTINUE, said
    assert yatt("report", str(file.run_dir)).returncode == 0
    kept = file.folder / "kept"
    shutil.copytree(file.run_dir, kept, symlinks=True)
    return file, kept


@pytest.mark.parametrize("damage", CHOSEN, ids=lambda damage: damage.__name__)
def test_a_run_with_damaged_files_is_seen_and_goes_on(stopped, damage):
    file, kept = stopped
    shutil.rmtree(file.run_dir)
    shutil.copytree(kept, file.run_dir, symlinks=True)
    paths = RunPaths(file.run_dir)
    for path in (paths.events, paths.metrics, paths.samples, paths.report, *paths.attempt(1).glob("logs/*")):
        damage(path)
    if damage in (a_folder, removed):
        damage(paths.latest)
    for words in (["status", "--json"], ["status"], ["list"], ["report"], ["logs"]):
        done = yatt(words[0], str(file.run_dir), *words[1:])
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0 or words == ["logs"], (words, done.stderr)
    status = json.loads(yatt("status", str(file.run_dir), "--json").stdout)
    assert status["state"] == "stopped"
    done = yatt("resume", str(file.run_dir))
    assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (EXIT_FINISHED, False), done.stdout
    assert rows(paths.metrics)[-1]["training/global_step"] == ITERATIONS
    assert file.leftovers() == []
