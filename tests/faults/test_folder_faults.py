"""A folder that misbehaves under a save: a full disk, and fsync that fails. Never a false commit."""

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import host_copies
from tests.host_copies import Trainer
from tests.obs_runs import event, make_run
from tests.saves import committed, save
from yatt.adapters.files.full_disk import fault_of_room
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.store.patient import PatientStore
from yatt.checkpoint.store.store import FolderStore
from yatt.cli.commands.look import status
from yatt.errors import YattError
from yatt.uploader import upload as upload_module

pytestmark = pytest.mark.faults


def begun(folder: Path, root: Path) -> Trainer:
    Checkpoints(FolderStore(root), 1).adopt(None)
    return Trainer(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    root = tmp_path / "disk"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", root], check=True)
    yield root / "store"
    subprocess.run(["umount", "-l", root], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a filesystem")
def test_a_full_disk_costs_the_save_and_leaves_nothing_of_it(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "BYTES", 300_000)  # three files of two such pieces
    trainer = begun(tmp_path, small_disk)
    with pytest.raises(OSError) as caught:
        save(PatientStore(FolderStore(small_disk), limit_s=1.0), trainer)
    assert caught.value.errno == errno.ENOSPC
    assert committed(FolderStore(small_disk)) == []
    hidden = [path for path in small_disk.rglob(".*") if path.is_file()]
    assert not hidden, "unfinished files would keep the disk full"
    Checkpoints(FolderStore(small_disk), 1).discard("global_step_1")
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk.parent], check=True)
    trainer.becomes(2)
    save(PatientStore(FolderStore(small_disk), limit_s=1.0), trainer, 2)
    assert committed(FolderStore(small_disk)) == [2]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a filesystem")
def test_status_says_that_the_run_folder_has_no_room(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_disk.mkdir()
    paths = make_run(small_disk, events=(event(0, "attempt.start", nodes=1),))
    status(paths.root, as_json=False)
    assert "  disk  " not in capsys.readouterr().out
    with contextlib.suppress(OSError), (small_disk / "other").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    status(paths.root, as_json=False)
    assert "  disk        No space left on device in the run folder. Make room" in capsys.readouterr().out
    status(paths.root, as_json=True)
    assert json.loads(capsys.readouterr().out)["no_room"] == "No space left on device"
    (small_disk / "other").unlink()
    assert fault_of_room(paths.root) == ""
    assert sorted(path.name for path in small_disk.iterdir()) == ["run"], "trying leaves nothing"


def test_a_quota_is_found_and_other_users_folders_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int) -> None:  # as NFS refuses: when what was written is sent
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", refused)
    assert fault_of_room(tmp_path) == "Disk quota exceeded"
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert fault_of_room(tmp_path) == ""


class FailingSync:
    """fsync whose calls number `at` to `at + times - 1` (from 0) fail with EIO."""

    def __init__(self, at: int, times: int) -> None:
        self._failing, self._real = range(at, at + times), os.fsync
        self.calls = 0

    def __call__(self, descriptor: int) -> None:
        self.calls += 1
        if self.calls - 1 in self._failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._real(descriptor)


def count_of_syncs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    trainer, sync = begun(folder, folder / "store"), FailingSync(0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        save(FolderStore(folder / "store"), trainer)
    return sync.calls


@pytest.mark.parametrize("is_patient", [False, True])
def test_a_failed_fsync_at_any_point_is_no_false_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_patient: bool
) -> None:
    """One failure is repeated with the whole file; without repetition the save fails, and says so."""
    monkeypatch.setattr(upload_module, "THREADS", 1)
    for name in ("calm", *map(str, range(40))):
        (tmp_path / name).mkdir()
    count, failed = count_of_syncs(tmp_path / "calm", monkeypatch), 0
    assert 8 <= count <= 40, "files, their folder, the manifest"
    for at in range(count):
        folder = tmp_path / str(at)
        root = folder / "store"
        trainer, store = begun(folder, root), FolderStore(root)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", FailingSync(at, 1))
            try:
                save(PatientStore(store, limit_s=5.0) if is_patient else store, trainer)
            except (OSError, YattError):
                failed += 1
                assert not is_patient
                commits = committed(FolderStore(root))  # whole, if the failure came after it had taken effect
                assert commits in ([], [1])
            else:
                assert committed(FolderStore(root)) == [1]
    assert bool(failed) is not is_patient
