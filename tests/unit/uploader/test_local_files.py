"""Local files beside an upload: whatever the local disk does costs these files, and never the save."""

import errno
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.host_copies import BYTES, FILES, Trainer, versions_in
from tests.runs import HANG_S
from tests.unit.config.test_upload_limit import config as config_of
from yatt.adapters.files.files import Buffer
from yatt.adapters.node_local.host_segment import Stamp
from yatt.checkpoint.local.local_tier import LocalTier, UnfinishedFile
from yatt.checkpoint.store.store import FolderStore, Written
from yatt.errors import StoreUnreachable
from yatt.records.message import ShardFile, Upload
from yatt.uploader import local_files, upload as upload_module
from yatt.uploader.local_files import LocalSave, LocalSaves
from yatt.uploader.upload import Throttle, UploadJob

PREFIX = "global_step_1/000001-aaaaaaaa"
BLOCK = BYTES // 3


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_module, "BLOCK_BYTES", BLOCK)


class Upset(FolderStore):
    """Each file's first stream fails after its second chunk."""

    def write_stream(self, name: str, chunks: Callable[[], Iterable[Buffer]]) -> Written:
        def cut() -> Iterable[Buffer]:
            for index, chunk in enumerate(chunks()):
                yield chunk
                if index == 2:
                    raise StoreUnreachable("the store is away", is_passing=True)

        with pytest.raises(StoreUnreachable):
            super().write_stream(name, cut)
        return super().write_stream(name, chunks)


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    (tmp_path / "local").mkdir()
    return LocalTier(tmp_path / "local")


def upload(
    folder: Path, local: LocalSave, store: FolderStore, trainer: Trainer | None = None
) -> tuple[ShardFile, ...]:
    job = UploadJob(
        local.beside(store), PREFIX, [(trainer or Trainer(folder)).stem], Stamp(1, 1), throttle=Throttle(0),
        tick=lambda: None,
    )  # fmt: skip
    try:
        return job.run()
    finally:
        job.close()


def local_save(tier: LocalTier, size_bytes: int = 1) -> LocalSave:
    local = LocalSave(lambda: tier, (PREFIX,), size_bytes)
    local.start()
    return local


def there(tier: LocalTier) -> list[str]:
    return sorted(path.name for path in tier.root.glob("global_step_*/*/*"))


def same_as_store(tier: LocalTier, store: FolderStore, files: Iterable[ShardFile]) -> None:
    for file in files:
        assert (tier.root / file.path).read_bytes() == store.read(file.path)
    assert len(there(tier)) == FILES


def test_a_stream_that_begins_again_replaces_what_was_written(tmp_path: Path, tier: LocalTier) -> None:
    local, store = local_save(tier), Upset(tmp_path / "store")
    files = upload(tmp_path, local, store)
    assert local.close() == ""
    same_as_store(tier, store, files)


def keeps_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = LocalSave._begin

    def once(self: LocalSave, name: str) -> None:
        if name not in self._unfinished:
            begin(self, name)

    monkeypatch.setattr(LocalSave, "_begin", once)


def keeps_the_callers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uploader's blocks are written again for the next block."""
    monkeypatch.setattr(local_files, "bytes", lambda chunk: chunk, raising=False)


@pytest.mark.parametrize("mistake", [keeps_the_beginning, keeps_the_callers_memory])
def test_a_planted_mistake_is_caught(
    tmp_path: Path, tier: LocalTier, mistake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    slow = UnfinishedFile.write

    def later(self: UnfinishedFile, data: bytes) -> None:
        time.sleep(0.005)
        slow(self, data)

    monkeypatch.setattr(UnfinishedFile, "write", later)
    trainer = Trainer(tmp_path)
    for place, segment in enumerate(trainer._segments.values()):  # each block has other bytes
        segment.invalidate()
        segment.data[:] = bytes((place + at // BLOCK) % 251 for at in range(len(segment.data)))
        segment.complete(Stamp(1, 1))
    local, store = local_save(tier), Upset(tmp_path / "store")
    files = upload(tmp_path, local, store, trainer)
    local.close()
    with pytest.raises(AssertionError):
        same_as_store(tier, store, files)


def fails_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UnfinishedFile, "write", write)


def fails_to_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    finish, seen = UnfinishedFile.finish, list[int]()

    def second(self: UnfinishedFile) -> None:
        seen.append(1)
        if len(seen) == 2:
            raise OSError(errno.EIO, "Input/output error")
        finish(self)

    monkeypatch.setattr(UnfinishedFile, "finish", second)


def fails_to_prune(monkeypatch: pytest.MonkeyPatch) -> None:
    def prune(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(LocalTier, "prune", prune)


def has_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalTier, "prune", lambda *_: 1 // 0)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)


@pytest.mark.parametrize(
    ("fault", "told"),
    [(fails_to_write, "No space left"), (fails_to_finish, "Input/output"), (fails_to_prune, "Read-only"),
     (has_a_defect, "a defect")],
)  # fmt: skip
def test_a_failing_disk_costs_the_local_files_only(
    tmp_path: Path, tier: LocalTier, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], told: str
) -> None:
    fault(monkeypatch)
    local, store = local_save(tier), FolderStore(tmp_path / "store")
    files = upload(tmp_path, local, store)
    assert told in local.close()
    assert versions_in(store, files) == {1}
    assert not local.is_busy(HANG_S) and not there(tier)


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path, tier: LocalTier) -> None:
    size_bytes = tier.free_bytes() + (100 << 30)
    local, store = local_save(tier, size_bytes), FolderStore(tmp_path / "store")
    files = upload(tmp_path, local, store)
    assert " GB are needed, and " in local.close()
    assert versions_in(store, files) == {1} and not list(tier.root.iterdir())


def test_a_slow_disk_costs_its_limit_and_the_local_files(
    tmp_path: Path, tier: LocalTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "PATIENCE_S", 0.5)
    monkeypatch.setattr(local_files, "BLOCKS", 2)
    permits = threading.Semaphore(3)
    monkeypatch.setattr(UnfinishedFile, "write", lambda *_: permits.acquire(timeout=HANG_S))
    local, store = local_save(tier), FolderStore(tmp_path / "store")
    files = upload(tmp_path, local, store)  # it does not wait for every block
    permits.release(100)
    assert local.close() == "the disk takes less than the checkpoint store"
    assert versions_in(store, files) == {1}
    assert not local.is_busy(HANG_S) and not there(tier)


def test_at_most_the_queue_is_in_memory(tmp_path: Path, tier: LocalTier, monkeypatch) -> None:
    awake, most = threading.Event(), list[int]()
    monkeypatch.setattr(local_files, "BLOCKS", 4)
    monkeypatch.setattr(local_files, "PATIENCE_S", 0.3)
    monkeypatch.setattr(UnfinishedFile, "write", lambda *_: awake.wait(HANG_S))
    local, store = local_save(tier), FolderStore(tmp_path / "store")
    put = local._queue.put

    def noted(*arguments: object, **more: object) -> None:
        put(*arguments, **more)  # type: ignore[arg-type]
        most.append(local._queue.qsize())

    monkeypatch.setattr(local._queue, "put", noted)
    upload(tmp_path, local, store)
    awake.set()
    assert max(most) <= 4 and not local.is_busy(HANG_S)


def test_after_a_hang_the_next_save_does_not_use_the_disk_and_a_later_one_does(
    tmp_path: Path, tier: LocalTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    awake, prune = threading.Event(), LocalTier.prune
    monkeypatch.setattr(LocalTier, "of", lambda *_: tier)
    monkeypatch.setattr(LocalTier, "prune", lambda *_: awake.wait(HANG_S))
    for name in ("CLOSE_S", "GIVEN_UP_S", "PATIENCE_S"):
        monkeypatch.setattr(local_files, name, 0.2)
    some = config_of(1, 1, 0, 0)
    saves = LocalSaves(replace(some, checkpoint=replace(some.checkpoint, local_dir="/somewhere")))
    order, store = Upload(iteration=1, url=PREFIX, stems=()), FolderStore(tmp_path / "store")
    trainer = Trainer(tmp_path)

    def one() -> str:
        local = saves.begin(order, 1)
        assert local is not None
        upload(tmp_path, local, store, trainer)
        return local.close()

    assert "the disk " in one()
    assert one() == "the disk still works on an earlier save"
    awake.set()
    monkeypatch.setattr(LocalTier, "prune", prune)
    assert saves._last is not None and not saves._last.is_busy(HANG_S)
    assert one() == "" and len(there(tier)) == FILES
    assert LocalSaves(some).begin(order, 1) is None, "without checkpoint.local_dir"


def test_an_upload_that_fails_leaves_no_local_files(tmp_path: Path, tier: LocalTier) -> None:
    class Failing(FolderStore):
        def write_stream(self, name: str, chunks: Callable[[], Iterable[Buffer]]) -> Written:
            if name.endswith("00002.safetensors"):
                raise StoreUnreachable("no room")
            return super().write_stream(name, chunks)

    local = local_save(tier)
    with pytest.raises(StoreUnreachable):
        upload(tmp_path, local, Failing(tmp_path / "store"))
    local.give_up("the upload has failed")
    assert not local.is_busy(HANG_S) and not there(tier)
