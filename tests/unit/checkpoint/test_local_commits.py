"""Local commits: created once, read whole or not at all, and fenced as commits in the store are."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.damage import empty, not_text, nul_block, removed, truncated
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest, weights_commit
from yatt.checkpoint.local.local_commits import LocalCommits
from yatt.checkpoint.store.store import FolderStore
from yatt.core.attempts import claims
from yatt.core.attempts.claims import Commit
from yatt.errors import CheckpointError, FolderGone
from yatt.paths import RunPaths


def manifest(iteration: int, attempt: int, run_id: str = "r1") -> Manifest:
    return Manifest(
        iteration=iteration, attempt=attempt, run_id=run_id, config_hash="", files=(), nodes=(),
        common=msgspec.Raw(b"{}"), row={"iteration": iteration},
    )  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(tmp_path / "run")


@pytest.fixture
def local(paths: RunPaths) -> LocalCommits:
    return LocalCommits(paths, "r1")


def start(paths: RunPaths, attempt: int, adopted: Manifest | None) -> Checkpoints:
    checkpoints = Checkpoints(FolderStore(paths.root / "checkpoints"), attempt, "r1")
    checkpoints.adopt(adopted)
    return checkpoints


def newer(local: LocalCommits, paths: RunPaths) -> list[tuple[int, int]]:
    found = local.newer(Checkpoints(FolderStore(paths.root / "checkpoints"), 0, "r1"))
    return [(commit.iteration, commit.attempt) for commit in found]


def test_what_was_recorded_is_read(local: LocalCommits) -> None:
    local.commit(manifest(3, 1), ("a", "b"))
    found, hosts = local.read(Commit(3, 1))
    assert msgspec.structs.replace(found, seal="") == manifest(3, 1) and hosts == ("a", "b")
    local.commit(manifest(3, 1), ("a", "b"))  # an action may be repeated
    with pytest.raises(CheckpointError, match="another save of this iteration"):
        local.commit(manifest(3, 1), ("a", "c"))


@pytest.mark.parametrize("damage", [truncated, empty, not_text, nul_block, removed])
def test_a_damaged_record_is_none(local: LocalCommits, paths: RunPaths, damage: Callable[..., None]) -> None:
    local.commit(manifest(3, 1), ("a",))
    damage(paths.local_commits / "00000003.000001.json")
    with pytest.raises(CheckpointError):
        local.read(Commit(3, 1))


def test_a_record_of_another_name_content_or_run_is_none(local: LocalCommits, paths: RunPaths) -> None:
    local.commit(manifest(3, 1), ("a",))
    record = paths.local_commits / "00000003.000001.json"
    (paths.local_commits / "00000004.000001.json").write_bytes(record.read_bytes())
    with pytest.raises(CheckpointError, match="another commit than its name says"):
        local.read(Commit(4, 1))
    record.write_bytes(record.read_bytes().replace(b'"iteration":3', b'"iteration":9'))
    with pytest.raises(CheckpointError, match="not what was sealed"):
        local.read(Commit(3, 1))
    LocalCommits(paths, "r2").commit(manifest(5, 1, "r2"), ("a",))
    with pytest.raises(CheckpointError, match="is of run r2"):
        local.read(Commit(5, 1))


def test_a_removed_run_folder_is_not_rebuilt(local: LocalCommits, paths: RunPaths) -> None:
    paths.root.rmdir()
    with pytest.raises(FolderGone):
        local.commit(manifest(3, 1), ())
    assert not paths.root.exists() and local.commits() == set()


# ---- the fence ----------------------------------------------------------------------------------


def test_a_local_commit_is_taken_if_it_is_newer_than_the_store(local: LocalCommits, paths: RunPaths) -> None:
    first = start(paths, 1, None)
    local.commit(manifest(3, 1), ())
    assert newer(local, paths) == [(3, 1)]
    first.commit(manifest(3, 1))
    assert newer(local, paths) == [], "the store has it"
    local.commit(manifest(4, 1), ())
    assert newer(local, paths) == [(4, 1)]
    first.commit(manifest(5, 1))
    assert newer(local, paths) == []


def test_a_local_commit_of_a_stale_attempt_is_never_taken(local: LocalCommits, paths: RunPaths) -> None:
    first = start(paths, 1, None)
    first.commit(manifest(2, 1))
    start(paths, 2, manifest(2, 1))
    local.commit(manifest(3, 1), ())
    assert newer(local, paths) == [], "attempt 2 has resumed from 2 before"


def test_a_local_commit_that_was_passed_over_is_never_taken_later(
    local: LocalCommits, paths: RunPaths
) -> None:
    start(paths, 1, None).commit(manifest(2, 1))
    local.commit(manifest(3, 1), ())
    assert newer(local, paths) == [(3, 1)]
    start(paths, 2, manifest(2, 1))  # its nodes were not there
    assert newer(local, paths) == []


def test_an_adopted_local_commit_stays_until_the_store_has_it(local: LocalCommits, paths: RunPaths) -> None:
    start(paths, 1, None).commit(manifest(2, 1))
    local.commit(manifest(3, 1), ())
    start(paths, 2, manifest(3, 1))
    assert newer(local, paths) == [(3, 1)], "attempt 2 was killed before its first commit"
    third = start(paths, 3, manifest(3, 1))
    third.commit(manifest(3, 3))
    assert newer(local, paths) == []
    names = Checkpoints(FolderStore(paths.root / "checkpoints"), 0).candidates().names
    assert names == ("manifests/00000003.000003.json", "manifests/00000002.000001.json")
    local.remove_until(3, 0)
    assert local.commits() == {Commit(3, 1)}, "a stale attempt removes nothing of a newer one"
    local.remove_until(3, 3)
    assert local.commits() == set()


def test_a_passing_error_is_told_and_a_lasting_one_passes_it_over(
    local: LocalCommits, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.commit(manifest(3, 1), ())
    for number, expected in ((errno.ESTALE, OSError), (errno.EACCES, CheckpointError)):

        def fails(*_: object, number: int = number) -> int:
            raise OSError(number, "planted")

        with monkeypatch.context() as patch, pytest.raises(expected, match="planted"):
            patch.setattr(os, "open", fails)
            local.read(Commit(3, 1))
    assert local.read(Commit(3, 1))[0].row == {"iteration": 3}


def test_a_record_of_another_format_is_refused_as_such(local: LocalCommits, paths: RunPaths) -> None:
    local.commit(msgspec.structs.replace(manifest(3, 1), schema_version=99), ())
    with pytest.raises(CheckpointError, match="has format 99"):
        local.read(Commit(3, 1))


def test_the_upload_of_a_local_commit_has_the_weights_of_that_commit() -> None:
    again = msgspec.structs.replace(manifest(3, 2), parent=(3, 1))
    assert weights_commit(again) == Commit(3, 1)
    assert weights_commit(msgspec.structs.replace(manifest(4, 2), parent=(3, 1))) == Commit(4, 2)


def test_several_are_tried_newest_first(local: LocalCommits, paths: RunPaths) -> None:
    start(paths, 1, None)
    local.commit(manifest(3, 1), ())
    start(paths, 2, manifest(3, 1))
    local.commit(manifest(5, 2), ())
    assert newer(local, paths) == [(5, 2), (3, 1)]


def test_a_store_that_is_not_mounted_shows_none(local: LocalCommits, paths: RunPaths) -> None:
    start(paths, 1, None)
    local.commit(manifest(3, 1), ())
    (paths.root / "checkpoints").rename(paths.root / "unmounted")
    assert newer(local, paths) == []


def histories(local: LocalCommits, paths: RunPaths, seed: int) -> None:
    """Starts that resume, commit locally or in the store, and stale ones that commit late."""
    draw = random.Random(seed)
    alive: list[tuple[Checkpoints, int]] = []
    adopted_at: dict[int, int] = {}
    for attempt in range(1, 7):
        checkpoints = Checkpoints(FolderStore(paths.root / "checkpoints"), attempt, "r1")
        usable = newer(local, paths)
        names = Checkpoints(checkpoints.store, 0).candidates().names
        whole = [each for each in usable if draw.random() < 0.7]
        stored = checkpoints.read(names[0]) if names else None
        taken = manifest(*whole[0]) if whole else stored
        base = taken.iteration if taken else 0
        if whole:
            assert stored is None or base > stored.iteration
        checkpoints.adopt(taken)
        adopted_at[attempt] = base
        alive.append((checkpoints, base))
        for _ in range(draw.randrange(4)):
            index = draw.randrange(len(alive))  # also stale ones
            writer, at = alive[index]
            alive[index] = writer, at + 1
            if draw.random() < 0.4:
                local.commit(manifest(at + 1, writer.attempt), ())
            else:
                writer.commit(manifest(at + 1, writer.attempt))
            for iteration, of_attempt in newer(local, paths):
                later = [adopted_at[a] for a in adopted_at if a > of_attempt]
                assert all(iteration <= each for each in later), "newer than what a later start resumed from"


@pytest.mark.parametrize("seed", range(40))
def test_no_history_takes_a_stale_one(local: LocalCommits, paths: RunPaths, seed: int) -> None:
    histories(local, paths, seed)


def test_a_fence_that_is_left_out_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "yatt.checkpoint.local.local_commits.valid_commits", lambda commits, _: sorted(commits, reverse=True)
    )
    assert claims.valid_commits(set(), {}) == []
    caught = 0
    for seed in range(40):
        paths = RunPaths(tmp_path / str(seed))
        paths.root.mkdir()
        try:
            histories(LocalCommits(paths, "r1"), paths, seed)
        except AssertionError:
            caught += 1
    assert caught


def test_strange_files_among_local_commits_are_ignored_or_damaged(
    local: LocalCommits, paths: RunPaths
) -> None:
    local.commit(manifest(3, 1), ("a",))
    for name in ("\u00b2.\u00b2.json", "4.2.json", f"{'9' * 200}.1.json", "00000009.000001"):
        (paths.local_commits / name).touch()
    assert local.commits() == {Commit(3, 1)}
    path = paths.local_commits / "00000003.000001.json"
    path.write_text('{"hosts":[],"manifest":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CheckpointError, match="is not a whole record of a local commit"):
        local.read(Commit(3, 1))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*is not a regular file"):
        local.read(Commit(3, 1))
