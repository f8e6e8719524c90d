"""A run that is going on is not started a second time; and one whose folder is removed stops."""

import itertools
import shutil
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.runs import RunFile, living, rows, start, wait_for, yatt
from yatt.adapters.files.files import make_within, sealed_record, write_atomically
from yatt.adapters.processes.process import Identity
from yatt.adapters.run_folder.ledger import ENDED, STARTED, record_of_attempt, write_record
from yatt.adapters.slurm.slurm import Slurm
from yatt.errors import EXIT_DO_NOT_RESTART, EXIT_USER_MISTAKE, EXIT_WILL_CONTINUE, ConfigError, FolderGone
from yatt.launch.folder import occupied
from yatt.launch.folder.occupied import make_way
from yatt.paths import RunPaths


def begun(folder: Path) -> tuple[RunFile, Path, RunPaths]:
    file = RunFile(
        folder,
        settings={
            "launch": {"nodes": 1},
            "trainer": {"total_iterations": 100_000},
            "checkpoint": {"save_every": 0, "export_final": False},
        },
    )
    return file, file.write(), RunPaths(file.run_dir)


def test_a_second_start_is_refused_and_takes_over_when_asked(tmp_path: Path) -> None:
    file, path, paths = begun(tmp_path)
    first = start("run", str(path))
    wait_for(lambda: len(rows(paths.metrics)) >= 2, timeout_s=90, what="two iterations")
    refused = yatt("run", str(path))
    assert refused.returncode == EXIT_USER_MISTAKE
    assert f"attempt 1 of this run is active in process {first.pid} of this machine" in refused.stderr
    assert "yatt cancel" in refused.stderr and "--take-over" in refused.stderr
    other = yatt("run", str(path), "--take-over", "rollout.n=8")
    assert (other.returncode, "rollout.n: was 4, is 8" in other.stderr) == (EXIT_USER_MISTAKE, True)
    assert yatt("resume", str(file.run_dir)).returncode == EXIT_USER_MISTAKE
    assert first.poll() is None and not paths.attempt(2).exists()

    second = start("resume", str(file.run_dir), "--take-over")
    said, _ = first.communicate(timeout=300)
    assert first.returncode == EXIT_WILL_CONTINUE, said
    saved = record_of_attempt(paths, 1, ENDED)["committed"]
    assert saved >= 2, "the first saved what it had trained"
    wait_for(lambda: len(rows(paths.metrics)) > saved, timeout_s=90, what="the second goes on")
    second.terminate()
    said, _ = second.communicate(timeout=300)
    assert second.returncode == EXIT_WILL_CONTINUE, said
    assert f"resumed from iteration {saved}" in said
    assert file.leftovers() == []


def test_a_run_whose_folder_is_removed_stops_and_builds_nothing_anew(tmp_path: Path) -> None:
    file, path, paths = begun(tmp_path)
    run = start("run", str(path))
    wait_for(lambda: len(rows(paths.metrics)) >= 1, timeout_s=90, what="an iteration")
    while file.run_dir.exists():
        shutil.rmtree(file.run_dir, ignore_errors=True)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == EXIT_DO_NOT_RESTART, said
    assert f"{file.run_dir} is gone: somebody removed or moved it" in said
    assert not file.run_dir.exists()
    assert "Traceback" not in said
    assert living(file.run_dir) == {} and file.leftovers() == []


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run folder whose newest attempt was started on another machine."""
    monkeypatch.setattr(occupied, "HEARTBEAT_WATCH_S", 1.0)
    paths = RunPaths(tmp_path)
    make_within(paths.root, paths.claims)
    (paths.claims / "000001").touch()
    me = Identity.of(1)
    assert me is not None
    other = asdict(replace(me, place="another boot"))
    write_record(paths, 1, STARTED, {"host": "far", "launcher": other})
    return paths


def test_a_start_on_another_machine_that_stands_still_is_over(elsewhere: RunPaths) -> None:
    write_atomically(elsewhere.heartbeat(1), sealed_record({"counter": 5}, 1))
    make_way(elsewhere, take_over=False)


def test_a_start_on_another_machine_whose_heartbeat_moves_is_refused(elsewhere: RunPaths) -> None:
    over = threading.Event()

    def beat() -> None:
        for counter in itertools.count(6):
            write_atomically(elsewhere.heartbeat(1), sealed_record({"counter": counter}, 1))
            if over.wait(0.1):
                return

    write_atomically(elsewhere.heartbeat(1), sealed_record({"counter": 5}, 1))
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="attempt 1 of this run is active, on far already"):
            make_way(elsewhere, take_over=False, slurm=Slurm())
    finally:
        over.set()
        thread.join()


def test_nothing_is_made_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FolderGone, match="is gone"):
        make_within(tmp_path / "run", tmp_path / "run" / "attempts" / "1")
    with pytest.raises(FolderGone, match="is gone"):
        write_record(RunPaths(tmp_path / "run"), 1, STARTED, {})
    assert list(tmp_path.iterdir()) == []
