"""Whole runs with a local tier: restarts read it, and whatever happens to it changes no result."""

import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BUCKET
from tests.faults.test_resume_exact import final_state, metrics
from tests.faults.test_saves_in_flight import events, same_end
from tests.runs import RunFile, held_after, killed_when, start, wait_for, yatt
from tests.seeds import seed_of
from tests.store_proxy import StoreProxy
from yatt.adapters.files.files import sealed_record, write_atomically
from yatt.adapters.run_folder.ledger import newest_attempt
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.store.store import FolderStore, Store
from yatt.paths import RunPaths

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]

CALLS = 8
"""Completions of an iteration that each of the two nodes scores."""

PLAIN = {"checkpoint": {"save_every": 1, "keep": 2}, "trainer": {"total_iterations": 5}}


def run_file(folder: Path, **checkpoint: Any) -> RunFile:
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    section = {**PLAIN["checkpoint"], "local_dir": "$YATT_TEST_DISK/disk", **checkpoint}
    return RunFile(folder, {**PLAIN, "checkpoint": section})


@pytest.fixture(autouse=True)
def variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YATT_TEST_DISK", str(tmp_path))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """An undisturbed run without a local tier."""
    run = RunFile(tmp_path_factory.mktemp("quick"), PLAIN)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def local_files(run: RunFile) -> list[Path]:
    return sorted((run.folder / "disk").glob("yatt-ckpt-*/*/global_step_*/*/rank-*"))


def killed_after(run: RunFile, iteration: int) -> None:
    """Kills everything after the commit of this iteration, and before the fifth one is done."""
    commits = lambda: [e for e in events(run, "ckpt.commit") if e["iteration"] >= iteration]  # noqa: E731
    hold = held_after(run.folder, 4 * CALLS)
    killed_when(run, commits, "a commit")
    hold.unlink()


def resumed(run: RunFile) -> dict[str, Any]:
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    return events(run, "attempt.resume")[-1]


def tensor_bytes(store: Store, iteration: int) -> int:
    """Bytes of all pieces of a committed checkpoint."""
    checkpoints = Checkpoints(store, 0)
    commit = next(c for c in checkpoints.commits() if c.iteration == iteration)
    name = f"manifests/{commit.iteration:08d}.{commit.attempt:06d}.json"
    return sum(p.size_bytes for file in checkpoints.read(name).files for p in file.tensors)


def trainer_logs(run: RunFile, attempt: int) -> str:
    folder = run.run_dir / "attempts" / f"{attempt:06d}" / "logs"
    return "".join(path.read_text() for path in folder.glob("trainer-*"))


def test_a_restart_with_whole_local_files_reads_no_tensor_from_the_store(
    quick: RunFile, tmp_path: Path, s3_endpoint: str
) -> None:
    with StoreProxy(s3_endpoint) as proxy:
        url = f"s3://{BUCKET}/local-{tmp_path.name}"
        run = run_file(tmp_path, url=url, storage_options={"endpoint_url": proxy.endpoint})
        killed_after(run, 3)
        proxy.read.clear()
        event = resumed(run)
        assert event["iteration"] >= 3 and event["local_bytes"] > 0
        read = [re.search(r"global_step_\d+/[^?]*", target) for target in proxy.read]
        tensors = [found[0] for found in read if found and "/rank-" in found[0]]
        assert tensors == [], "all tensors came from the local tier"
        assert any("manifests/" in target for target in proxy.read), "requests were counted"
    assert metrics(run) == metrics(quick)
    assert not local_files(run), "a finished run leaves nothing"


def test_between_saves_there_are_two_and_clean_takes_those_of_an_ended_run(tmp_path: Path) -> None:
    run = run_file(tmp_path)
    killed_after(run, 3)
    saves = {path.parent for path in local_files(run)}
    committed = {p.name for p in (run.run_dir / "checkpoints").glob("global_step_*/*")}
    assert 1 <= len({save for save in saves if save.name in committed}) <= 2
    assert len(saves) <= 3, "two committed ones, or one and one in flight"
    shown = yatt("clean", str(tmp_path / "disk"), str(run.scratch), str(run.shm))
    assert "yatt-ckpt" not in shown.stdout and local_files(run), "it can go on"
    paths = RunPaths(run.run_dir)
    write_atomically(paths.finished, sealed_record({}, newest_attempt(paths)))
    shown = yatt("clean", "--dry-run", str(tmp_path / "disk"))
    assert "would remove" in shown.stdout and local_files(run)
    shown = yatt("clean", str(tmp_path / "disk"))
    assert re.search(r"removed .*/yatt-ckpt-\d+/r\w+ ", shown.stdout), shown.stdout
    assert not local_files(run)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(seed_of("YATT_FUZZ_SEED")).randrange(len(data) // 2, len(data))] ^= 0x10
    path.write_bytes(data)


def test_what_is_not_whole_locally_comes_from_the_store(quick: RunFile, tmp_path: Path) -> None:
    """A whole run, since one rank reads its disk and the other the store. Other damages are in
    `unit/checkpoint/test_local_tier.py`."""
    run = run_file(tmp_path)
    killed_after(run, 3)
    for path in local_files(run):
        if path.name.startswith("rank-00001"):
            flipped(path)
    store = FolderStore(run.run_dir / "checkpoints")
    whole = {each.iteration: tensor_bytes(store, each.iteration) for each in Checkpoints(store, 0).commits()}
    event = resumed(run)
    assert 0 < event["local_bytes"] < 2 * whole[event["iteration"]]
    assert "the local copy is removed" in trainer_logs(run, 2)
    assert not events(run, "ckpt.skip"), "the checkpoint counts as whole"
    same_end(run, quick)


def test_other_nodes_read_everything_from_the_store(quick: RunFile, tmp_path: Path) -> None:
    run = run_file(tmp_path)
    killed_after(run, 2)
    (tmp_path / "disk").rename(tmp_path / "of-other-nodes")
    (tmp_path / "disk").mkdir()
    assert resumed(run)["local_bytes"] == 0
    same_end(run, quick)


def test_an_unfinished_file_of_a_killed_writer_is_removed_by_the_next_start(
    quick: RunFile, tmp_path: Path
) -> None:
    run = run_file(tmp_path, max_bytes_per_s=400_000)
    killed_when(run, lambda: list((tmp_path / "disk").glob("*/*/*/*/*.unfinished")), "a save")
    left = set((tmp_path / "disk").glob("*/*/*/*/*.unfinished"))
    assert left
    process = start("run", str(run.write()))
    try:
        wait_for(lambda: not any(path.exists() for path in left), timeout_s=120, what="the removal")
    finally:
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    same_end(run, quick)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_without_room_costs_an_event_per_save_and_node(
    quick: RunFile, tmp_path: Path, small_disk: Path
) -> None:
    run = run_file(tmp_path)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    told = events(run, "ckpt.local")
    assert {event["node"] for event in told} == {0, 1}
    assert len(told) == 2 * len(events(run, "ckpt.commit"))
    assert all("are free" in event["error"] for event in told)
    assert "has no local files of checkpoint" in done.stdout
    same_end(run, quick)


def test_a_folder_that_is_not_there_costs_events_and_nothing_else(quick: RunFile, tmp_path: Path) -> None:
    run = run_file(tmp_path, local_dir="$NOT_SET_ANYWHERE/disk")
    killed_after(run, 2)
    assert resumed(run)["local_bytes"] == 0
    assert all("is not an absolute path" in event["error"] for event in events(run, "ckpt.local"))
    assert events(run, "ckpt.local")
    same_end(run, quick)


def test_the_state_at_the_end_is_in_the_store(quick: RunFile, tmp_path: Path) -> None:
    run = run_file(tmp_path)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert final_state(run) == final_state(quick)
    assert tensor_bytes(FolderStore(run.run_dir / "checkpoints"), 5) > 0
    assert not events(run, "ckpt.local") and not local_files(run)
