"""A checkpoint folder that is not mounted looks empty: the run waits for it and never starts again from 0."""

import errno
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import HANG_S, RunFile, kill, living, rows, start, wait_for
from yatt.adapters.files.files import sealed_record, write_atomically
from yatt.adapters.run_folder.ledger import (
    COMMITTED,
    STARTED,
    known_commit,
    look_whether_finished,
    record_of_attempt,
    write_record,
)
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.ownership import store_owner
from yatt.checkpoint.commit.run_store import claimed_run_store
from yatt.checkpoint.store.store import FolderStore
from yatt.config.load import load_run_config
from yatt.errors import CheckpointsMissing
from yatt.launch.folder.committed import await_committed
from yatt.launch.folder.folder import open_folder
from yatt.launch.resolve.completed import completed_config
from yatt.paths import RunPaths

pytestmark = pytest.mark.faults


def run_file(folder: Path) -> RunFile:
    settings = {
        "launch": {"nodes": 1},
        "trainer": {"total_iterations": 6},
        "checkpoint": {"url": str(folder / "mount" / "store")},
    }
    return RunFile(folder, settings)


@pytest.fixture
def committed(tmp_path: Path) -> RunFile:
    """A run that was killed, all of it, after its first commit; then its store was unmounted."""
    run = run_file(tmp_path)
    process = start("run", str(run.write()))
    try:
        wait_for(lambda: known_commit(RunPaths(run.run_dir))[0], timeout_s=120, what="a commit")
    finally:
        kill(process.pid)
        for pid in living(run.run_dir):
            kill(pid)
        process.communicate()
    wait_for(lambda: not living(run.run_dir), what="the end of all processes")
    (tmp_path / "mount").rename(tmp_path / "away")
    (tmp_path / "mount" / "store").mkdir(parents=True)
    return run


class Resuming:
    """`yatt run` or `yatt resume`, and what it says."""

    def __init__(self, *words: str) -> None:
        self.process: subprocess.Popen[str] = start(*words)
        self.said: list[str] = []
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stdout), daemon=True)
        self._reader.start()

    def waits(self) -> list[str]:
        return [line for line in self.said if "waiting for it" in line]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=HANG_S)
        self._reader.join(timeout=HANG_S)
        self.process.stdout.close()


@pytest.fixture(params=["run", "resume"])
def resuming(request, committed: RunFile):
    target = committed.run_dir if request.param == "resume" else committed.write()
    found = Resuming(request.param, str(target))
    yield found
    found.close()


def test_an_unmounted_store_is_waited_for_and_gone_on_from(tmp_path: Path, committed, resuming) -> None:
    (line,) = wait_for(resuming.waits, timeout_s=60, what="the launcher to wait")
    iteration, _ = known_commit(RunPaths(committed.run_dir))
    assert f"the checkpoint store {tmp_path / 'mount' / 'store'} holds no checkpoint" in line
    assert f"iteration {iteration} of this run was committed" in line
    assert not list((tmp_path / "mount" / "store").iterdir()), "nothing is written where the store should be"
    (tmp_path / "mount").rename(tmp_path / "bare")
    (tmp_path / "away").rename(tmp_path / "mount")
    assert resuming.process.wait(timeout=300) == 0, resuming.said
    events = rows(committed.run_dir / "events.jsonl")
    assert min(e["iteration"] for e in events if e["kind"] == "attempt.resume" and e["attempt"] > 1) > 0
    steps = [row["training/global_step"] for row in rows(committed.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, 7))


def opened(folder: Path) -> tuple:
    config = completed_config(load_run_config([run_file(folder).write()], []))
    config = replace(config, launch=replace(config.launch, phase_timeout_s=1.0))
    return config, open_folder(config)


def test_the_wait_for_an_unmounted_store_ends_with_what_the_ledger_knows(tmp_path: Path) -> None:
    config, paths = opened(tmp_path)
    write_record(paths, 1, STARTED, {})
    said: list[str] = []
    assert await_committed(config, paths.root, is_told=lambda: False, say=said.append) == 0
    write_record(paths, 1, COMMITTED, {"iteration": 4})
    with pytest.raises(CheckpointsMissing, match=r"iteration 4 of this run was committed .*000001 says so"):
        await_committed(config, paths.root, is_told=lambda: False, say=said.append)
    assert len(said) == 1


def test_a_controller_neither_claims_nor_uses_a_store_that_is_not_there(tmp_path: Path) -> None:
    config, paths = opened(tmp_path)
    store = tmp_path / "mount" / "store"
    (store / "run_id").unlink()
    claimed_run_store(config, paths.root, print)
    write_record(paths, 1, COMMITTED, {"iteration": 4})
    (store / "run_id").unlink()
    with pytest.raises(CheckpointsMissing) as caught:
        claimed_run_store(config, paths.root, print)
    assert caught.value.exit_code == 1
    assert store_owner(FolderStore(store)) == ""


def test_a_manifest_that_was_written_where_the_store_should_be_is_no_mistake_of_the_user(
    tmp_path: Path,
) -> None:
    """It was unmounted between the files of a save and its manifest."""
    config, paths = opened(tmp_path)
    store = tmp_path / "mount" / "store"
    claimed_run_store(config, paths.root, print).create("manifests/00000004.000001.json", b"{}")
    write_record(paths, 1, COMMITTED, {"iteration": 4})
    claimed_run_store(config, paths.root, print)
    (store / "run_id").unlink()
    with pytest.raises(CheckpointsMissing, match=r"is claimed by no run, but iteration 4") as caught:
        claimed_run_store(config, paths.root, print)
    assert caught.value.exit_code == 1
    assert store_owner(FolderStore(store)) == ""


def test_a_late_commit_of_a_stale_attempt_is_no_sign_of_a_missing_store(tmp_path: Path) -> None:
    config, paths = opened(tmp_path)
    store = claimed_run_store(config, paths.root, print)
    for attempt in (1, 2):  # the second goes on from the beginning before the first has committed anything
        Checkpoints(store, attempt, config.run.id).adopt(None)
    store.create("manifests/00000001.000001.json", b"{}")
    write_record(paths, 1, COMMITTED, {"iteration": 1})
    assert Checkpoints(store, 3, config.run.id).candidates().names == ()
    claimed_run_store(config, paths.root, print)


def test_a_torn_record_is_no_commit_and_one_that_cannot_be_read_is_not_taken_for_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = RunPaths(tmp_path)
    write_record(paths, 1, STARTED, {"committed": 2})
    write_atomically(paths.attempt(1) / COMMITTED, sealed_record({"iteration": 9}, 1)[:-4])
    assert known_commit(paths) == (2, 1)
    opening = os.open

    def opened(path, *arguments, **more):
        if str(path).endswith(COMMITTED):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opening(path, *arguments, **more)

    with monkeypatch.context() as bad_block:
        bad_block.setattr(os, "open", opened)
        with pytest.raises(OSError, match="Input/output error"):
            known_commit(paths)
    (paths.attempt(1) / COMMITTED).unlink()
    (paths.attempt(1) / COMMITTED).mkdir()
    assert known_commit(paths) == (2, 1), "a folder in its place is damage, which does not pass"
    assert record_of_attempt(paths, 1, COMMITTED) == {}
    assert f"{COMMITTED} should be a record, but is a folder" in caplog.text


def test_a_note_of_the_end_that_cannot_be_read_is_not_taken_for_absent(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert not look_whether_finished(paths)
    paths.finished.mkdir()
    with pytest.raises(IsADirectoryError):
        look_whether_finished(paths)
    paths.finished.rmdir()
    write_atomically(paths.finished, sealed_record({}, 1))
    assert look_whether_finished(paths)
