"""Files that are whole or absent, and claims with one winner."""

import multiprocessing
from pathlib import Path

import pytest

from yatt.adapters import files
from yatt.adapters.attempt_claim import check_newest, claim_attempt, mark_finished, remove_leftovers
from yatt.adapters.files import claim, publish, read_or_none, sealed, unsealed
from yatt.adapters.ledger import newest_attempt
from yatt.errors import StaleAttempt
from yatt.paths import RunPaths


def test_publishing_replaces_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    publish(path, b"one")
    publish(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_claim_is_won_once(tmp_path: Path) -> None:
    path = tmp_path / "000001"
    assert claim(path, b"me")
    assert not claim(path, b"you")
    assert path.read_bytes() == b"me"
    assert [p.name for p in tmp_path.iterdir()] == ["000001"]


def test_a_torn_or_foreign_record_is_not_read(tmp_path: Path) -> None:
    record = sealed({"address": "tcp://x"}, 3)
    assert unsealed(record, 3) == {"address": "tcp://x", "attempt": 3}
    assert unsealed(record[:-5], 3) is None
    assert unsealed(None, 3) is None
    assert unsealed(record, 4) is None, "of an older attempt"
    with pytest.raises(StaleAttempt, match="attempt 3 was claimed while 2 was running"):
        unsealed(record, 2)
    assert read_or_none(tmp_path / "nothing") is None


def _claim(folder: str, results: "multiprocessing.Queue[int]") -> None:
    results.put(claim_attempt(RunPaths(Path(folder))))


def test_racing_starts_claim_different_attempts(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    starts = [context.Process(target=_claim, args=(str(tmp_path), results)) for _ in range(8)]
    for process in starts:
        process.start()
    attempts = sorted(results.get(timeout=20) for _ in starts)
    for process in starts:
        process.join()
    assert attempts == list(range(1, 9))
    assert newest_attempt(RunPaths(tmp_path)) == 8


def test_a_ghost_finds_out(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    mine = claim_attempt(paths)
    check_newest(paths, mine)
    claim_attempt(paths)
    with pytest.raises(StaleAttempt, match="this attempt is over"):
        check_newest(paths, mine)


def _cut_off(path: Path) -> Path:
    """A writer's temporary file, as a kill before the rename leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return files._write_temporary(path, (b"half",))


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    attempt = claim_attempt(paths)
    left = [_cut_off(paths.attempt(attempt) / "heartbeat"), _cut_off(paths.root / "metrics.jsonl")]
    claimed = _cut_off(paths.claims / "000002")
    publish(paths.attempt(attempt) / "heartbeat", b"1")
    (paths.root / ".hidden").touch()
    remove_leftovers(paths, attempt)
    assert [path.exists() for path in left] == [False, False]
    assert claimed.exists(), "of a start that may be claiming"
    assert (paths.root / ".hidden").exists()
    assert read_or_none(paths.attempt(attempt) / "heartbeat") == b"1"


def test_a_ghost_removes_nothing_of_its_heirs(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    stale = claim_attempt(paths)
    heirs = _cut_off(paths.attempt(claim_attempt(paths)) / "heartbeat")
    for act in (remove_leftovers, mark_finished):
        with pytest.raises(StaleAttempt):
            act(paths, stale)
    assert heirs.exists()
