"""What a failed upload or commit leaves in the store, and what the leader is told. The store is real."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.core.test_placement import config as colocated
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.local.local_commits import LocalCommits
from yatt.checkpoint.store.store import FolderStore
from yatt.control.leader.alarms import Alarms
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.metrics_row import MetricsRow
from yatt.control.leader.saves.commits import Commits
from yatt.control.node import Node
from yatt.core.attempts.claims import Commit
from yatt.core.gpus.placement import placement_of
from yatt.core.phases import phases
from yatt.core.phases.time_left import RESERVE_S
from yatt.errors import EXIT_DO_NOT_RESTART, StoreTakenOver, StoreUnreachable, WorkerFailed
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths
from yatt.records import message as m
from yatt.records.shards import StateFile

PREFIX = "global_step_3/000001-aaaaaaaa"


class Nodes:
    """The trainer nodes: each upload writes one file after `upload_s`, then may fail. A save to the local
    disks takes no time; with `has_bad_disk` it fails."""

    def __init__(self, store: FolderStore, error: Exception | None = None) -> None:
        self._store, self._error = store, error
        self.upload_s, self.has_bad_disk, self.orders = 0.0, False, list[m.Upload]()

    async def ask_trainer_nodes(self, order: m.Upload) -> list[m.Uploaded]:
        path = f"{order.url}/rank-00000-00000.safetensors"
        self.orders.append(order)
        if order.is_local:
            if self.has_bad_disk:
                raise WorkerFailed("the disk is full")
            local = m.ShardFile(path=path, size_bytes=5, checksum="-")
            state = StateFile(path=f"{order.url}/node-00000.groups", size_bytes=5, checksum="-")
            return [m.Uploaded(files=(local,), state=state, host="n1")]
        await asyncio.sleep(self.upload_s)
        self._store.write(path, b"shard")
        self._store.write(f"{order.url}/node-00000.groups", b"state")
        if self._error is not None:
            raise self._error
        file = m.ShardFile(path=path, size_bytes=5, checksum="-")
        state = StateFile(path=f"{order.url}/node-00000.groups", size_bytes=5, checksum="-")
        return [m.Uploaded(files=(file,), state=state)]


class LosesReplies(FolderStore):
    """Writes a manifest, and then says that it could not."""

    def create(self, name: str, data: bytes) -> bool:
        super().create(name, data)
        raise StoreUnreachable("the reply was lost", is_passing=True)


def commits_of(folder: Path, store: FolderStore, nodes: Any, local_dir: str = "") -> tuple[Commits, Inbox]:
    some = colocated(1, 1, 0, 0)
    kind = replace(some, checkpoint=replace(some.checkpoint, local_dir=local_dir))
    node = Node(
        config=kind, paths=RunPaths(folder), placement=placement_of(kind), attempt=1, index=0, host="",
        device="cpu",
    )  # fmt: skip
    told: list[str] = []
    events = EventLog(attempt=1, node=0, role="controller", sink=told.append)
    row = MetricsRow(node, None, Alarms(kind, events))  # type: ignore[arg-type]  # nothing is written
    inbox = Inbox()
    checkpoints = Checkpoints(store, 1)
    FolderStore.create(store, "adopted/000001.json", b'{"iteration":0,"attempt":0}')
    (folder / "claims").mkdir(parents=True, exist_ok=True)
    return Commits(node, nodes, checkpoints, events, inbox, row), inbox


def draft_of(iteration: int) -> Manifest:
    return Manifest(
        iteration=iteration, attempt=1, config_hash="", files=(), nodes=(), common=msgspec.Raw(b"{}")
    )


def played(folder: Path, store: FolderStore, error: Exception | None = None) -> list[phases.Event]:
    """One save; gives the events that the leader gets."""

    async def scene() -> list[phases.Event]:
        commits, inbox = commits_of(folder, store, Nodes(store, error))
        commits.begin(PREFIX, draft_of(3), 1)
        await asyncio.gather(*commits._tasks)
        await commits.close()
        return list(inbox._events)

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


def last_saves(
    folder: Path, *, upload_s: float, left_s: float, local_dir: str = "/disk", has_bad_disk: bool = False
) -> tuple[list[phases.Event], list[bool]]:
    """A save is in flight when the request to stop comes; the next one begins, and again if it fails."""
    store = FolderStore(folder / "store")
    nodes = Nodes(store)
    nodes.upload_s, nodes.has_bad_disk = upload_s, has_bad_disk

    async def one(commits: Commits, iteration: int) -> None:
        commits.begin(f"global_step_{iteration}/000001-{len(nodes.orders):08d}", draft_of(iteration), 5)
        await asyncio.sleep(0.05)

    async def scene() -> list[phases.Event]:
        commits, inbox = commits_of(folder / "run", store, nodes, local_dir)
        await one(commits, 3)
        inbox.stop("the time limit is near", left_s)
        await asyncio.gather(*commits._tasks)
        await one(commits, 4)
        await asyncio.gather(*commits._tasks)
        if isinstance(inbox._events[-1], phases.SaveFailed):
            await one(commits, 4)
            await asyncio.gather(*commits._tasks)
        await commits.close()
        return [event for event in inbox._events if not isinstance(event, phases.StopWanted)]

    return asyncio.run(scene()), [order.is_local for order in nodes.orders]


def test_an_upload_that_ends_in_time_is_awaited_and_the_next_is_kept(tmp_path: Path) -> None:
    events, is_local = last_saves(tmp_path, upload_s=3.0, left_s=RESERVE_S + 4.5)
    assert events == [phases.Committed(3), phases.SaveGivenUp(4, is_kept=True)]
    assert is_local == [False, True]
    manifest, hosts = LocalCommits(RunPaths(tmp_path / "run"), "").read(Commit(4, 1))
    assert hosts == ("n1",) and manifest.files[0].path.startswith("global_step_4/")


def test_an_upload_that_would_come_too_late_is_given_up_in_time(tmp_path: Path) -> None:
    events, is_local = last_saves(tmp_path, upload_s=3600.0, left_s=RESERVE_S + 1.0)
    assert events == [phases.SaveGivenUp(3, is_kept=False), phases.SaveGivenUp(4, is_kept=True)]
    assert is_local == [False, True]


def test_with_time_or_without_a_local_tier_both_go_to_the_store(tmp_path: Path) -> None:
    both = [phases.Committed(3), phases.Committed(4)]
    assert last_saves(tmp_path / "a", upload_s=0.3, left_s=60.0) == (both, [False, False])
    assert last_saves(tmp_path / "b", upload_s=0.3, left_s=0.0, local_dir="") == (both, [False, False])


def test_a_local_disk_that_fails_sends_the_next_try_to_the_store(tmp_path: Path) -> None:
    events, is_local = last_saves(tmp_path, upload_s=2.0, left_s=RESERVE_S + 0.2, has_bad_disk=True)
    failed = phases.SaveFailed(4, "the disk is full")
    assert events == [phases.SaveGivenUp(3, is_kept=False), failed, phases.Committed(4)]
    assert is_local == [False, True, False]
    assert LocalCommits(RunPaths(tmp_path / "run"), "").commits() == set()
