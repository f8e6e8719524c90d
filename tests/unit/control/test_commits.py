"""What a failed upload or commit leaves in the store, and what the leader is told. The store is real."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.core.test_placement import config as colocated
from yatt.checkpoint.manifest import Checkpoints, Manifest
from yatt.checkpoint.store import FolderStore
from yatt.control.leader.alarms import Alarms
from yatt.control.leader.commits import Commits
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.metrics_row import MetricsRow
from yatt.control.node import Node
from yatt.core import phases
from yatt.core.placement import place
from yatt.errors import EXIT_DO_NOT_RESTART, StoreTakenOver, StoreUnreachable, WorkerFailed
from yatt.obs.events import EventLog
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m

PREFIX = "global_step_3/000001-x"


class Nodes:
    """The trainer nodes: each upload writes one file, then may fail."""

    def __init__(self, store: FolderStore, error: Exception | None = None) -> None:
        self._store, self._error = store, error

    async def ask_trainer_nodes(self, order: c.UploadOrder) -> list[c.UploadedNode]:
        path = f"{order.url}/rank-00000-00000.safetensors"
        self._store.write(path, b"shard")
        if self._error is not None:
            raise self._error
        file = m.ShardFile(path=path, size_bytes=5, checksum="-")
        state = c.StateFile(path=path, size_bytes=5, checksum="-")
        return [c.UploadedNode(files=(file,), state=state)]


class LosesReplies(FolderStore):
    """Writes a manifest, and then says that it could not."""

    def create(self, name: str, data: bytes) -> bool:
        super().create(name, data)
        raise StoreUnreachable("the reply was lost", is_passing=True)


def played(folder: Path, store: FolderStore, error: Exception | None = None) -> list[phases.Event]:
    """One save; gives the events that the leader gets."""

    async def scene() -> list[phases.Event]:
        kind = colocated(1, 1, 0, 0)
        node = Node(
            config=kind, paths=RunPaths(folder), placement=place(kind), attempt=1, index=0, host="",
            device="cpu",
        )  # fmt: skip
        told: list[str] = []
        events = EventLog(attempt=1, node=0, role="controller", sink=told.append)
        nodes: Any = Nodes(store, error)
        row = MetricsRow(node, None, Alarms(kind, events))  # type: ignore[arg-type]  # nothing is written
        inbox = Inbox()
        checkpoints = Checkpoints(store, 1)
        FolderStore.create(store, "adopted/000001.json", b'{"iteration":0,"attempt":0}')
        commits = Commits(node, nodes, checkpoints, events, inbox, row)
        draft = Manifest(
            iteration=3, attempt=1, config_hash="", files=(), nodes=(), common=msgspec.Raw(b"{}")
        )
        commits.begin(PREFIX, draft)
        await asyncio.gather(*commits._tasks)
        await commits.close()
        return list(inbox._events)

    (folder / "claims").mkdir(parents=True, exist_ok=True)
    return asyncio.run(scene())


def test_a_save_that_succeeds_is_committed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    assert played(tmp_path / "run", store) == [phases.Committed(3)]
    found = Checkpoints(store, 0).newest().manifest
    assert found is not None and found.iteration == 3


@pytest.mark.parametrize("error", [WorkerFailed("node1 is lost"), OSError(28, "No space left on device")])
def test_an_upload_that_fails_leaves_no_file(tmp_path: Path, error: Exception) -> None:
    store = FolderStore(tmp_path / "store")
    (event,) = played(tmp_path / "run", store, error)
    assert isinstance(event, phases.SaveFailed) and event.iteration == 3
    assert not list((tmp_path / "store").glob("global_step_3/*"))


def test_a_commit_whose_reply_is_lost_keeps_its_files(tmp_path: Path) -> None:
    """The manifest may be there: without its files it would be a torn checkpoint."""
    (event,) = played(tmp_path / "run", LosesReplies(tmp_path / "store"))
    assert event == phases.SaveFailed(3, "the reply was lost")
    found = Checkpoints(FolderStore(tmp_path / "store"), 0).newest()
    assert found.manifest is not None and found.skipped == ()


def test_a_store_that_was_taken_over_ends_the_attempt(tmp_path: Path) -> None:
    taken = StoreTakenOver("taken over by another folder")
    first, second = played(tmp_path / "run", FolderStore(tmp_path / "store"), taken)
    assert first == phases.Failure("taken over by another folder", EXIT_DO_NOT_RESTART)
    assert isinstance(second, phases.SaveFailed)


def test_a_defect_is_told_and_not_lost(tmp_path: Path) -> None:
    (event,) = played(tmp_path / "run", FolderStore(tmp_path / "store"), KeyError("x"))
    assert isinstance(event, phases.Failure) and "a defect in saving: KeyError('x')" in event.error
