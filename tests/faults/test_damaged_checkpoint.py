"""A damaged checkpoint is found out while it is restored, and the run goes on from the next older one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_folder_between_attempts import Process
from tests.runs import RunFile, command, kill, living, rows, start, wait_for, yatt
from yatt.obs.metrics import comparable_results

pytestmark = pytest.mark.faults
ITERATIONS = 60


def interrupted(folder: Path, **sections: dict[str, Any]) -> RunFile:
    """A run that was killed, all of it, once it had a few checkpoints."""
    settings = {"trainer": {"total_iterations": ITERATIONS}, "checkpoint": {"keep": 3}}
    run = RunFile(folder, settings | sections)
    process = start("run", str(run.write()))
    try:
        wait_for(lambda: len(manifests(run)) >= 3, timeout_s=120, what="three checkpoints")
        kill(process.pid)
        for pid in living(run.run_dir):
            kill(pid)
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not living(run.run_dir), what="the end of all processes")
    return run


def manifests(run: RunFile) -> list[Path]:
    return sorted((run.run_dir / "checkpoints" / "manifests").glob("*.json"))


def flip_last_bit(run: RunFile, manifest: Path, kind: str = "files") -> None:
    """In the last rank's, or the last controller's, file; the file keeps its size."""
    content: dict[str, Any] = json.loads(manifest.read_text())
    path = run.run_dir / "checkpoints" / content[kind][-1]["path"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def events(run: RunFile, kind: str) -> list[dict[str, Any]]:
    return [event for event in rows(run.run_dir / "events.jsonl") if event["kind"] == kind]


def test_a_flipped_bit_costs_one_checkpoint_and_changes_no_result(tmp_path: Path) -> None:
    """In a rank's file of the newest, in a controller's file of the one before. A whole run, since all nodes
    must go on from the same one."""
    run = interrupted(tmp_path / "damaged")
    *_, whole, older, newest = manifests(run)
    flip_last_bit(run, newest, "files")
    flip_last_bit(run, older, "nodes")
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(run, "attempt.resume")[-1]["iteration"] == int(whole.name.partition(".")[0])
    skipped = [event["reason"] for event in events(run, "ckpt.skip")]
    assert len(skipped) == 2
    for manifest, reason in zip((newest, older), skipped, strict=True):
        assert manifest.name in reason and "is not what was saved" in reason
    calm = RunFile(tmp_path / "calm", run.settings)
    assert yatt("run", str(calm.write())).returncode == 0
    assert metrics(run) == metrics(calm)


def metrics(run: RunFile) -> list[dict[str, Any]]:
    return [comparable_results(row) for row in rows(run.run_dir / "metrics.jsonl")]


def test_with_no_whole_checkpoint_left_the_run_ends_and_says_so_instead_of_starting_over(
    tmp_path: Path,
) -> None:
    run = interrupted(tmp_path)
    damaged = manifests(run)  # three that are kept, and perhaps one that was to be deleted when it was killed
    for manifest in damaged:
        flip_last_bit(run, manifest)
    before = len(events(run, "attempt.start"))
    done = yatt("run", str(run.write()))
    assert done.returncode == 93, done.stdout + done.stderr
    assert "no checkpoint of this run can be restored" in done.stdout
    assert "is not what was saved" in done.stdout
    assert len(events(run, "ckpt.skip")) == len(damaged) >= 3
    assert len(events(run, "attempt.start")) - before == 2, "one attempt of two controllers"
    assert not any(event["iteration"] == 0 for event in events(run, "attempt.resume")[1:])


def test_a_bad_block_costs_one_checkpoint_although_it_fails_for_ever(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "run", launch={"nodes": 1, "phase_timeout_s": 30})
    *_, older, newest = manifests(run)
    bad = json.loads(newest.read_text())["files"][-1]["path"]
    (tmp_path / "weather").write_text(f"error {bad}")
    resumed = Process(command("resume", str(run.run_dir)), run.run_dir, tmp_path / "weather")
    try:
        wait_for(lambda: len(events(run, "attempt.resume")) == 2, timeout_s=120, what="the resumed run")
        resumed.process.terminate()
        resumed.process.wait(timeout=300)
    finally:
        resumed.close()
    assert len(events(run, "attempt.start")) == 2, "one attempt found a whole checkpoint"
    assert events(run, "attempt.resume")[-1]["iteration"] == int(older.name.partition(".")[0])
    (skipped,) = events(run, "ckpt.skip")
    assert bad in skipped["reason"]
    assert "the rest of the store can be read" in skipped["reason"]
