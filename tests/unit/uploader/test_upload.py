"""The uploader: what is written is one version or nothing, however slow the store and quick the trainer."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.host_copies import BYTES, FILES, PIECES, Trainer, versions_in
from tests.runs import HANG_S
from yatt.adapters.files.files import Buffer
from yatt.adapters.node_local.host_segment import AREAS, WEIGHTS, Stamp, plan_path
from yatt.checkpoint.store.store import FolderStore, Written
from yatt.errors import StoreUnreachable, WorkerFailed
from yatt.records.message import PlannedPiece
from yatt.uploader import upload as upload_module
from yatt.uploader.upload import RankSnapshot, Throttle, UploadJob


class GatedStore(FolderStore):
    """Takes a file's second chunk only after `opened`; with `fails`, each file's first stream fails."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun, self.opened, self.fails = threading.Semaphore(0), threading.Event(), False

    def write_stream(self, name: str, chunks: Callable[[], Iterable[Buffer]]) -> Written:
        tries = iter((1, 2))

        def gated() -> Iterable[Buffer]:
            is_first = next(tries) == 1
            for index, chunk in enumerate(chunks()):
                yield chunk
                if index == 1:
                    self.begun.release()
                    self.opened.wait(HANG_S)
                    if self.fails and is_first:
                        raise StoreUnreachable("the store is away", is_passing=True)

        try:
            return super().write_stream(name, gated)
        except StoreUnreachable:
            return super().write_stream(name, gated)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_module, "BLOCK_BYTES", BYTES // 3)


def job_of(store: FolderStore, trainers: list[Trainer], version: int = 1) -> UploadJob:
    stems = [trainer.stem for trainer in trainers]
    return UploadJob(store, "p/q", stems, Stamp(1, version), throttle=Throttle(0), tick=lambda: None)


def uploading(job: UploadJob) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(job.run())
        except WorkerFailed as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_the_files_of_all_ranks_are_written_with_their_checksums(tmp_path: Path) -> None:
    trainers, store = [Trainer(tmp_path, rank) for rank in (0, 1)], FolderStore(tmp_path / "store")
    job = job_of(store, trainers)
    files = job.run()
    job.close()
    assert [f.path for f in files] == [
        f"p/q/rank-{rank:05d}-{index:05d}.safetensors" for rank in (0, 1) for index in range(FILES)
    ]
    assert versions_in(store, files) == {1}
    assert [piece.key for piece in files[0].tensors] == ["main.p0", "main.p1"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_copied_out_is_of_the_old_version_also_when_the_store_asks_again(
    tmp_path: Path, fails: bool
) -> None:
    trainer, store = Trainer(tmp_path), GatedStore(tmp_path / "store")
    store.fails = fails
    job = job_of(store, [trainer])
    thread, results = uploading(job)
    for _ in range(FILES):
        store.begun.acquire(timeout=HANG_S)
    assert job.detach(AREAS) == FILES * PIECES * BYTES
    assert job.detach(AREAS) == 0, "once is enough"
    trainer.becomes(2)
    store.opened.set()
    thread.join(HANG_S)
    assert versions_in(store, results[0]) == {1}  # type: ignore[arg-type]
    job.close()


def test_only_the_areas_that_will_change_are_copied_out_and_each_piece_is_progress(tmp_path: Path) -> None:
    trainer, store, ticks = Trainer(tmp_path), GatedStore(tmp_path / "store"), list[int]()
    job = UploadJob(
        store, "p/q", [trainer.stem], Stamp(1, 1), throttle=Throttle(0), tick=lambda: ticks.append(1)
    )
    thread, results = uploading(job)
    for _ in range(FILES):
        store.begun.acquire(timeout=HANG_S)
    before = len(ticks)
    assert job.detach((WEIGHTS,)) == FILES * PIECES * BYTES // 2
    assert len(ticks) == before + FILES * PIECES // 2
    trainer.becomes(2, areas=(WEIGHTS,))
    store.opened.set()
    thread.join(HANG_S)
    assert versions_in(store, results[0]) == {1}  # type: ignore[arg-type]
    job.close()


def test_files_that_are_done_are_not_copied_out(tmp_path: Path) -> None:
    trainer, store = Trainer(tmp_path), FolderStore(tmp_path / "store")
    job = job_of(store, [trainer])
    job.run()
    assert job.detach(AREAS) == 0
    job.close()


def test_a_host_copy_that_changes_without_notice_is_never_uploaded(tmp_path: Path) -> None:
    trainer, store = Trainer(tmp_path), GatedStore(tmp_path / "store")
    job = job_of(store, [trainer])
    thread, results = uploading(job)
    store.begun.acquire(timeout=HANG_S)
    trainer.becomes(2)
    store.opened.set()
    thread.join(HANG_S)
    assert isinstance(results[0], WorkerFailed)
    assert "is version 2 of attempt 1; version 1 of attempt 1 was asked for" in str(results[0])
    with pytest.raises(WorkerFailed, match="is version 2"):
        job.detach(AREAS)
    job.close()


def believes_any_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yatt.adapters.node_local.host_segment.SegmentReader.is_still", lambda *_: True)


def looks_before_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def block(self: RankSnapshot, file: int, piece: PlannedPiece, begin: int, room: memoryview) -> Buffer:
        assert self._segments[piece.area].stamp() is not None
        room[:] = self._now(piece)[begin : begin + len(room)]
        return room

    monkeypatch.setattr(RankSnapshot, "_block", block)


def forgets_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankSnapshot, "detach", lambda *_: FILES * PIECES * BYTES)


@pytest.mark.parametrize("mistake", [believes_any_stamp, looks_before_it_copies, forgets_to_keep])
def test_a_planted_mistake_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    trainer, store = Trainer(tmp_path), GatedStore(tmp_path / "store")
    mistake(monkeypatch)
    monkeypatch.setattr(upload_module, "THREADS", 1)
    job = job_of(store, [trainer])
    thread, results = uploading(job)
    store.begun.acquire(timeout=HANG_S)
    if mistake is forgets_to_keep:
        job.detach(AREAS)
    trainer.becomes(2)
    store.opened.set()
    thread.join(HANG_S)
    job.close()
    is_wrong = isinstance(results[0], WorkerFailed) or versions_in(store, results[0]) != {1}  # type: ignore[arg-type]
    assert is_wrong, "the tests above would not notice this mistake"


def test_a_copy_of_another_version_or_without_a_plan_is_refused_at_once(tmp_path: Path) -> None:
    trainer, store = Trainer(tmp_path), FolderStore(tmp_path / "store")
    with pytest.raises(WorkerFailed, match="is version 1 of attempt 1; version 5 of attempt 1 was asked for"):
        job_of(store, [trainer], version=5)
    plan_path(trainer.stem).write_bytes(b"\xc1")
    with pytest.raises(WorkerFailed, match="cannot be read as the plan of a save"):
        job_of(store, [trainer])
    assert not (tmp_path / "store").exists()


def test_one_failing_file_ends_the_others(tmp_path: Path) -> None:
    class Failing(FolderStore):
        def write_stream(self, name: str, chunks: Callable[[], Iterable[Buffer]]) -> Written:
            if name.endswith("00001.safetensors"):
                raise StoreUnreachable("no room")
            return super().write_stream(name, chunks)

    job = job_of(Failing(tmp_path / "store"), [Trainer(tmp_path)])
    with pytest.raises(StoreUnreachable, match="no room"):
        job.run()
    job.close()


def test_a_throttle_spreads_bytes_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(upload_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(upload_module.time, "sleep", sleep)
    throttle = Throttle(1000)
    for _ in range(4):
        throttle.wait(500)
    assert slept == [0, 0.5, 0.5, 0.5]
    Throttle(0).wait(10**12)
    assert len(slept) == 4
