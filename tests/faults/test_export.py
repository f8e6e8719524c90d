"""The trained model cannot be written at the end of a run: that costs time, and never what was learnt."""

import os
import subprocess
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.faults.test_folder_between_attempts import met
from tests.runs import ROOT, RunFile, command, environment, rows, start, wait_for, yatt

pytestmark = pytest.mark.faults
WEATHER = ROOT / "tests" / "soak" / "weather"
ITERATIONS = 3


def run_file(folder: Path) -> RunFile:
    return RunFile(folder, {
        "run": {"max_attempts_without_progress": 1}, "launch": {"nodes": 1},
        "trainer": {"total_iterations": ITERATIONS}, "checkpoint": {"save_every": 0},
    })  # fmt: skip


def phases(run: RunFile, attempt: int) -> set[str]:
    events = rows(run.run_dir / "events.jsonl")
    return {e["phase"] for e in events if e["kind"] == "phase.begin" and e["attempt"] == attempt}


def exported(run: RunFile) -> list[str]:
    (path,) = (run.run_dir / "model").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        return list(file.keys())


def test_a_folder_that_fails_for_a_while_is_waited_for(tmp_path: Path) -> None:
    run, weather, env = run_file(tmp_path), tmp_path / "weather", environment()
    env["PYTHONPATH"] = f"{WEATHER}:{env['PYTHONPATH']}"
    env |= {"YATT_SOAK_RUN": str(run.run_dir / "model"), "YATT_SOAK_WEATHER": str(weather)}
    weather.write_text("error")
    process = subprocess.Popen(
        command("run", str(run.write())), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_for(lambda: "save" in phases(run, 1), timeout_s=120, what="the last save")
        wait_for(lambda: met(weather) > 5, what="the export to be tried again")
        os.unlink(weather)
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert exported(run)
    assert phases(run, 2) == set(), said


def test_what_cannot_be_written_for_good_costs_no_training(tmp_path: Path) -> None:
    run = run_file(tmp_path)
    config = str(run.write())
    process = start("run", config)
    try:
        wait_for(lambda: phases(run, 1), timeout_s=120, what="the first phase")
        (run.run_dir / "model").write_text("something of the user's")
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 93, said
    assert f"{run.run_dir}/model" in said
    (run.run_dir / "model").unlink()
    again = yatt("resume", str(run.run_dir))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "rollout" not in phases(run, 2), "all was trained and committed"
    assert exported(run)
