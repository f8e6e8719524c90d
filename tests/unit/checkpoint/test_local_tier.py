"""The local tier: what is whole is read locally, all else comes from the store; strangers' files stay."""

import errno
import fcntl
import json
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.damage import a_fifo, a_folder, empty, nul_block, removed, truncated
from tests.host_copies import FILES, Trainer, versions_in
from tests.runs import HANG_S
from tests.unit.config.test_upload_limit import config as config_of
from yatt.adapters.files.files import sealed_record, write_atomically
from yatt.adapters.node_local.host_segment import Stamp
from yatt.checkpoint.local import local_first, local_tier
from yatt.checkpoint.local.local_first import LocalFirst
from yatt.checkpoint.local.local_store import LocalStore
from yatt.checkpoint.local.local_tier import LocalTier, UnfinishedFile, folders_of_ended_runs
from yatt.checkpoint.store.store import FolderStore
from yatt.config.schema import RunConfig
from yatt.errors import CheckpointError
from yatt.paths import RunPaths
from yatt.records.message import ShardFile
from yatt.uploader.local_files import LocalSave
from yatt.uploader.upload import Throttle, UploadJob

PREFIX = "global_step_1/000001-aaaaaaaa"


class CountedStore(FolderStore):
    """Counts the reads of each file; with `is_away` it has nothing."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[str] = []
        self.is_away = False

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.reads.append(name)
        assert not self.is_away, "the store was read"
        return super().read_ranges(name, ranges)

    def size(self, name: str) -> int | None:
        return FolderStore.size(self, name)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[CountedStore, LocalTier, tuple[ShardFile, ...]]:
    """A save of one rank, in the store and in the local tier."""
    store, tier = CountedStore(tmp_path / "store"), tier_at(tmp_path / "local")
    local = LocalSave(lambda: tier, (PREFIX,), 1)
    local.start()
    job = UploadJob(
        local.beside(store), PREFIX, [Trainer(tmp_path).stem], Stamp(1, 1), throttle=Throttle(0),
        tick=lambda: None,
    )  # fmt: skip
    files = job.run()
    job.close()
    assert local.close() == ""
    return store, tier, files


def tier_at(root: Path) -> LocalTier:
    root.mkdir()
    return LocalTier(root)


class Reader:
    """LocalFirst as `versions_in` reads it."""

    def __init__(self, store: CountedStore, tier: LocalTier, files: Sequence[ShardFile]) -> None:
        self.first, self._store = LocalFirst(store, lambda: tier, files), store

    def size(self, name: str) -> int | None:
        return self._store.size(name)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self.first.read_ranges(name, ranges)


def test_local_files_are_those_of_the_store_and_are_enough(saved) -> None:
    store, tier, files = saved
    for file in files:
        assert (tier.root / file.path).read_bytes() == store.read(file.path)
        assert stat.S_IMODE((tier.root / file.path).stat().st_mode) == 0o600
    store.is_away = True
    reader = Reader(store, tier, files)
    assert versions_in(reader, files) == {1}
    assert reader.first.local_bytes == sum(p.size_bytes for f in files for p in f.tensors)
    assert not store.reads


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def a_link(path: Path) -> None:
    target = path.parent / "target"
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.parametrize("damage", [flipped, truncated, nul_block, empty, removed, a_fifo, a_folder, a_link])
def test_a_damaged_file_is_read_from_the_store_and_goes(
    saved, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store, tier, files = saved
    path = tier.root / files[1].path
    damage(path)
    reader = Reader(store, tier, files)
    with caplog.at_level(logging.WARNING):
        assert versions_in(reader, files) == {1}
    assert files[1].path in store.reads and files[0].path not in store.reads
    if damage is removed:
        assert not caplog.text, "another node has it"
        return
    assert "the local copy is removed" in caplog.text and files[1].path in caplog.text
    if damage is a_folder:
        assert "is not read any more" in caplog.text
    else:
        assert not path.exists() and not path.is_symlink()
        assert set(store.reads) == {files[1].path}, "all other files were local"


def believes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_first, "check_piece", lambda *_: None)


def reads_only_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedStore, "read_ranges", lambda *_: [b""])


@pytest.mark.parametrize("mistake", [believes_everything, reads_only_locally])
def test_a_planted_mistake_is_caught(saved, mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    store, tier, files = saved
    flipped(tier.root / files[1].path)
    mistake(monkeypatch)
    with pytest.raises(CheckpointError):
        versions_in(Reader(store, tier, files), files)


def test_a_disk_that_hangs_costs_one_wait(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    store, tier, files = saved
    awake, ended = threading.Event(), list[bool]()
    monkeypatch.setattr(local_tier, "READ_S", 0.3)
    monkeypatch.setattr(LocalTier, "size", lambda *_: ended.append(awake.wait(HANG_S)) or 1)
    reader = Reader(store, tier, files)
    assert versions_in(reader, files) == {1}
    assert not ended and reader.first.local_bytes == 0
    awake.set()


def test_a_tier_that_cannot_be_opened_is_tried_once(saved, caplog: pytest.LogCaptureFixture) -> None:
    store, _, files = saved
    tries = []

    def opened() -> LocalTier:
        tries.append(1)
        raise OSError(errno.EIO, "the disk is gone")

    reader = LocalFirst(store, opened, files)
    for file in files:
        reader.read_ranges(file.path, [(p.begin, p.begin + p.size_bytes) for p in file.tensors])
    assert len(tries) == 1 and caplog.text.count("the disk is gone") == 1


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "global_step_1/../x", "global_step_1/a/b/c", "manifests/1/x"]
)
def test_a_name_that_is_none_of_a_save_touches_nothing(tmp_path: Path, name: str) -> None:
    tier = tier_at(tmp_path / "tier")
    assert tier.path(name) is None and tier.size(name) is None
    tier.remove(name)


def test_saves_that_are_not_kept_are_removed(tmp_path: Path) -> None:
    tier = tier_at(tmp_path / "tier")
    saves = [f"global_step_{n}/{a:06d}-ab" for n, a in ((1, 1), (2, 1), (2, 2), (3, 2))]
    for save in saves:
        (tier.root / save).mkdir(parents=True)
        (tier.root / save / "rank-00000-00000.safetensors").touch()
    (tier.root / "run.json").touch()
    tier.prune((saves[2], saves[3]))
    left = {str(path.relative_to(tier.root)) for path in tier.root.glob("global_step_*/*")}
    assert left == set(saves[2:]) and (tier.root / "run.json").exists()
    assert not (tier.root / "global_step_1").exists()
    tier.prune(())
    assert not list(tier.root.glob("global_step_*"))


def test_two_processes_may_prune_at_once(tmp_path: Path) -> None:
    tier, failed = tier_at(tmp_path / "tier"), list[OSError]()

    def prune(barrier: threading.Barrier) -> None:
        barrier.wait()
        try:
            tier.prune((PREFIX,))
        except OSError as error:
            failed.append(error)

    for _ in range(40):
        for number in range(2, 5):
            save = tier.root / f"global_step_{number}" / "000001-ab"
            save.mkdir(parents=True)
            for file in range(8):
                (save / f"rank-{file}").touch()
        barrier = threading.Barrier(3)
        threads = [threading.Thread(target=prune, args=(barrier,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        assert not list(tier.root.glob("global_step_*"))


def test_unfinished_files_of_dead_writers_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    tier = tier_at(tmp_path / "tier")
    alive = UnfinishedFile(tier.root / PREFIX / "rank-00000-00000.safetensors")
    dead = tier.root / PREFIX / "rank-00001-00000.safetensors.abcd.unfinished"
    dead.touch()
    whole = tier.root / PREFIX / "rank-00002-00000.safetensors"
    whole.touch()
    tier.tidy()
    assert not dead.exists() and whole.exists()
    alive.write(b"x")
    alive.finish()
    assert (tier.root / PREFIX / "rank-00000-00000.safetensors").read_bytes() == b"x"
    assert not list(tier.root.glob("**/*.unfinished"))


def test_a_finished_file_has_no_lock_left(tmp_path: Path) -> None:
    file = UnfinishedFile(tmp_path / "a" / "b")
    file.finish()
    with (tmp_path / "a" / "b").open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---- whose folders ------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "disk").mkdir()
    some: RunConfig = config_of(1, 1, 0, 0)
    return replace(
        some, run=replace(some.run, id="r1", dir=str(tmp_path / "run")),
        checkpoint=replace(some.checkpoint, local_dir=str(tmp_path / "disk")),
    )  # fmt: skip


def test_the_folders_are_private_and_name_their_run(config: RunConfig, tmp_path: Path) -> None:
    root = LocalTier.of(config).root
    assert root == tmp_path / "disk" / f"yatt-ckpt-{os.getuid()}" / "r1"
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (root, root.parent)} == {0o700}
    assert LocalTier.of(config).root == root


def test_a_planted_link_or_an_open_folder_is_refused(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    own = tmp_path / "disk" / f"yatt-ckpt-{os.getuid()}"
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a private folder"):
        LocalTier.of(config)
    own.unlink()
    own.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="not a private folder"):
        LocalTier.of(config)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("folder", ["$NOT_SET/x", "/nowhere/at/all"])
def test_a_folder_that_is_not_there_or_not_absolute_is_refused(config: RunConfig, folder: str) -> None:
    wrong = replace(config, checkpoint=replace(config.checkpoint, local_dir=folder))
    with pytest.raises(OSError):
        LocalTier.of(wrong)


def test_folders_of_finished_and_of_removed_runs_have_ended(config: RunConfig, tmp_path: Path) -> None:
    disk, paths = tmp_path / "disk", RunPaths(tmp_path / "run")
    root = LocalTier.of(config).root
    paths.root.mkdir()
    assert list(folders_of_ended_runs(disk)) == [], "it can go on"
    (paths.claims / "000003").mkdir(parents=True)
    write_atomically(paths.finished, sealed_record({}, 2))
    assert list(folders_of_ended_runs(disk)) == [], "a stale attempt's record does not count"
    write_atomically(paths.finished, sealed_record({}, 3))
    assert list(folders_of_ended_runs(disk)) == [root]
    shutil.rmtree(paths.root)
    assert list(folders_of_ended_runs(disk)) == [root]
    noted = json.loads((root / "run.json").read_text())
    (root / "run.json").write_text(json.dumps({**noted, "run": "/not/mounted/here/run"}))
    assert list(folders_of_ended_runs(disk)) == [], "its filesystem may not be mounted here"
    (root / "run.json").write_text(json.dumps({**noted, "parent": noted["parent"] + 1}))
    assert list(folders_of_ended_runs(disk)) == [], "the folder below may be an empty mount point"
    for text in ("", "[]", '{"run": 7, "parent": 7}', '{"run": "relative", "parent": 7}', "\x00"):
        (root / "run.json").write_text(text)
        assert list(folders_of_ended_runs(disk)) == []
    assert list(folders_of_ended_runs(tmp_path / "nowhere")) == []


def test_every_file_of_the_save_has_a_local_file(saved) -> None:
    _, tier, files = saved
    assert len(list(tier.root.glob("global_step_*/*/*"))) == len(files) == FILES


def test_a_disk_that_hangs_is_no_local_commit(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tier, files = saved
    awake, ended = threading.Event(), list[bool]()
    monkeypatch.setattr(local_tier, "READ_S", 0.3)
    monkeypatch.setattr(LocalTier, "read_ranges", lambda *_: ended.append(awake.wait(HANG_S)))
    with pytest.raises(CheckpointError, match=r"did not answer within 0.3 s"):
        LocalStore(lambda: tier).read_ranges(files[0].path, [(0, 8)])
    assert not ended
    awake.set()
