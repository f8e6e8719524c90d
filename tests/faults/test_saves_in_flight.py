"""Saves that are uploaded while the run goes on: slow stores, failing stores, kills during an upload."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, held_after, kill, living, rows, start, wait_for, yatt
from yatt.obs.metrics import STEP

pytestmark = pytest.mark.faults

SLOW = {"checkpoint": {"save_every": 1, "keep": 2, "max_bytes_per_s": 400_000}, "launch": {"nodes": 1}}
"""The policy of the tests has 1.2 MB of state: a save takes about three seconds, an iteration less."""

QUICK = {"checkpoint": {"save_every": 1, "keep": 2}, "launch": {"nodes": 1}}


def events(run: RunFile, kind: str = "") -> list[dict[str, Any]]:
    path = run.run_dir / "events.jsonl"
    return [e for e in rows(path) if not kind or e["kind"] == kind] if path.exists() else []


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """An undisturbed run with a quick store."""
    run = RunFile(tmp_path_factory.mktemp("quick"), QUICK)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def same_end(run: RunFile, other: RunFile) -> None:
    """The parameters, optimizer state and metrics of both runs' ends are the same, bit for bit."""
    assert metrics(run) == metrics(other)
    assert final_state(run) == final_state(other)


def test_training_goes_on_beside_a_slow_store_and_ends_the_same(quick: RunFile, tmp_path: Path) -> None:
    run = RunFile(tmp_path, SLOW)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    same_end(run, quick)
    told = events(run)
    commits = [e["iteration"] for e in told if e["kind"] == "ckpt.commit"]
    assert commits[-1] == 4 and len(commits) < 4, "saves were postponed"
    assert [e["in_flight"] for e in told if e["kind"] == "ckpt.postpone"]
    assert all(e["size_bytes"] > 0 for e in told if e["kind"] == "ckpt.backpressure")
    first = next(i for i, e in enumerate(told) if e["kind"] == "ckpt.commit")
    begun = {e["phase"] for e in told[:first] if e["kind"] == "phase.begin" and e["iteration"] == 2}
    assert "train" in begun, "iteration 2 was trained while iteration 1 was uploaded"
    assert not run.leftovers()


def test_an_optimizer_on_the_host_is_copied_aside_before_it_changes(quick: RunFile, tmp_path: Path) -> None:
    run = RunFile(tmp_path, {**SLOW, "trainer": {"offload_optimizer": True}})
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    same_end(run, quick)
    assert events(run, "ckpt.backpressure")
    assert not [e for e in events(run) if e["kind"] in ("ckpt.lost", "ckpt.fail")]
    assert events(run, "ckpt.commit")[-1]["iteration"] == 4


def test_what_a_critics_turn_changes_is_copied_aside_before(tmp_path: Path) -> None:
    """A whole run: turns on the GPU change what an upload reads at that time."""
    section = {"critic": {"swap": True}, "algorithm": {"adv_estimator": "gae"}}
    run = RunFile(tmp_path, {**SLOW, **section, "model": {"trainer": "megatron"}})
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(run, "ckpt.backpressure")
    assert not [e for e in events(run) if e["kind"] in ("ckpt.lost", "ckpt.fail")]
    assert events(run, "ckpt.commit")[-1]["iteration"] == 4
    found = [row for row in rows(run.run_dir / "metrics.jsonl") if STEP in row]
    assert found and all(row["timing_s/swap_in_critic"] > 0 for row in found)


@pytest.fixture
def slow_run(tmp_path: Path) -> Iterator[tuple[RunFile, "subprocess.Popen[str]"]]:
    run = RunFile(tmp_path, SLOW)
    process = start("run", str(run.write()))
    try:
        wait_for(lambda: in_flight(run), timeout_s=90, what="an upload")
        yield run, process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def in_flight(run: RunFile) -> list[Path]:
    """Unfinished files of the store."""
    return list((run.run_dir / "checkpoints").glob("global_step_*/*/.*"))


def test_an_uploader_that_is_killed_is_started_again_and_the_run_ends_the_same(
    quick: RunFile, slow_run: tuple[RunFile, "subprocess.Popen[str]"]
) -> None:
    run, process = slow_run
    for _ in range(2):
        (pid,) = [pid for pid, name in living(run.run_dir).items() if name == "yatt.uploader"]
        kill(pid)
        wait_for(
            lambda old=pid: [p for p, n in living(run.run_dir).items() if n == "yatt.uploader" and p != old],
            timeout_s=60, what="the next uploader",
        )  # fmt: skip
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    same_end(run, quick)
    assert {e["attempt"] for e in events(run)} == {1}, "the attempt went on"


def test_a_save_waits_for_an_uploader_that_is_not_started_again_yet(tmp_path: Path) -> None:
    """A whole run: its iteration ends within the half second after which an uploader is started again."""
    hold = held_after(tmp_path, 0)
    once = {"model": {"trainer": "scripted"}, "trainer": {"total_iterations": 1}}
    run = RunFile(tmp_path, {**QUICK, **once})
    process = start("run", str(run.write()))
    try:
        wait_for(lambda: is_sampling(run), timeout_s=90, what="the first rollout")
        (pid,) = [pid for pid, name in living(run.run_dir).items() if name == "yatt.uploader"]
        kill(pid)
        hold.unlink()
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, output
    assert not events(run, "ckpt.fail")
    assert [e["iteration"] for e in events(run, "ckpt.commit")] == [1]


def is_sampling(run: RunFile) -> bool:
    return any(e["phase"] == "rollout" for e in events(run, "phase.begin"))


def test_a_kill_of_everything_during_an_upload_loses_that_save_only(
    quick: RunFile, slow_run: tuple[RunFile, "subprocess.Popen[str]"]
) -> None:
    run, process = slow_run
    kill(process.pid)
    for pid in living(run.run_dir):
        kill(pid)
    process.communicate()
    wait_for(lambda: not living(run.run_dir), what="all to be gone")
    assert run.leftovers(), "the host copy was left"
    before = len(events(run, "ckpt.commit"))
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = events(run, "attempt.resume")[-1]["iteration"]
    assert resumed == (events(run, "ckpt.commit")[before - 1]["iteration"] if before else 0)
    same_end(run, quick)
    assert not run.leftovers()
    stores = list((run.run_dir / "checkpoints").glob("global_step_*/*"))
    named = {path.rpartition("/")[0] for path in files_in_manifests(run)}
    assert {str(p.relative_to(run.run_dir / "checkpoints")) for p in stores} == named, (
        "no file without a commit"
    )


def files_in_manifests(run: RunFile) -> set[str]:
    found = set()
    for manifest in (run.run_dir / "checkpoints" / "manifests").glob("*.json"):
        content = json.loads(manifest.read_text())
        found |= {file["path"] for file in (*content["files"], *content["nodes"])}
    return found


def test_a_last_save_that_fails_is_made_again_in_the_same_attempt(tmp_path: Path) -> None:
    """A whole run: the leader repeats save, publication and sync of a version that engines have already."""
    settings = {**QUICK, "launch": {"nodes": 1, "phase_timeout_s": 10}, "trainer": {"total_iterations": 3}}
    run = RunFile(tmp_path, settings | {"checkpoint": {"save_every": 3, "keep": 2}})
    path = run.run_dir / "checkpoints"
    process = start("run", str(run.write()))
    try:
        wait_for(
            lambda: path.is_dir() and events(run, "weights.publish"), timeout_s=90, what="the first iteration"
        )
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", path], check=True)
        try:
            wait_for(lambda: events(run, "ckpt.fail"), timeout_s=90, what="the last save to fail")
        finally:
            subprocess.run(["umount", "-l", path], check=True)
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, output
    assert [attempt.name for attempt in (run.run_dir / "attempts").iterdir()] == ["000001"], output
    assert events(run, "ckpt.commit")[-1]["iteration"] == 3


def test_a_store_that_takes_no_file_costs_saves_and_then_the_attempt_says_why(tmp_path: Path) -> None:
    """Training continues through two failed saves; a run that can never save does not go on for ever."""
    settings = {**QUICK, "launch": {"nodes": 1, "phase_timeout_s": 15}, "trainer": {"total_iterations": 40}}
    run = RunFile(tmp_path, settings)
    process = start("run", str(run.write()))
    try:
        wait_for(lambda: events(run, "ckpt.commit"), timeout_s=90, what="a commit")
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", run.run_dir / "checkpoints"], check=True
        )
        try:
            output, _ = process.communicate(timeout=300)
        finally:
            subprocess.run(["umount", "-l", run.run_dir / "checkpoints"], check=True)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode in (1, 75, 93), output
    assert "saves in a row have failed; the last one:" in output
    fails = events(run, "ckpt.fail")
    assert len([e for e in fails if e["attempt"] == 1]) == 3, "each save that failed was told"
    trained = [row[STEP] for row in rows(run.run_dir / "metrics.jsonl")]
    assert max(trained) >= 30, "training went on meanwhile"
    done = yatt("resume", str(run.run_dir), timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
