"""Files that are whole or absent, and claims with one winner."""

import hashlib
import multiprocessing
import os
from pathlib import Path

import pytest

from tests.runs import HANG_S
from yatt.adapters.files import files
from yatt.adapters.files.files import (
    create_exclusively,
    read_or_none,
    record_in,
    sealed_record,
    unsealed_any,
    write_atomically,
)
from yatt.adapters.run_folder.attempt_claim import (
    check_newest,
    claim_attempt,
    mark_finished,
    remove_leftovers,
)
from yatt.adapters.run_folder.ledger import (
    COMMITTED,
    STARTED,
    known_commit,
    newest_attempt,
    started_attempts,
    write_record,
)
from yatt.errors import StaleAttempt
from yatt.paths import RunPaths


def test_publishing_replaces_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_claim_is_won_once(tmp_path: Path) -> None:
    path = tmp_path / "000001"
    assert create_exclusively(path, b"me")
    assert not create_exclusively(path, b"you")
    assert path.read_bytes() == b"me"
    assert [p.name for p in tmp_path.iterdir()] == ["000001"]


def test_a_torn_or_foreign_record_is_not_read(tmp_path: Path) -> None:
    record = sealed_record({"address": "tcp://x"}, 3)
    assert record_in(record, 3) == {"address": "tcp://x", "attempt": 3}
    assert record_in(record[:-5], 3) is None
    assert record_in(None, 3) is None
    assert record_in(record, 4) is None, "of an older attempt"
    with pytest.raises(StaleAttempt, match="attempt 3 was claimed while 2 was running"):
        record_in(record, 2)
    assert read_or_none(tmp_path / "nothing") is None


def _claim(folder: str, results: "multiprocessing.Queue[int]") -> None:
    results.put(claim_attempt(RunPaths(Path(folder))))


def test_racing_starts_claim_different_attempts(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    starts = [context.Process(target=_claim, args=(str(tmp_path), results)) for _ in range(8)]
    for process in starts:
        process.start()
    attempts = sorted(results.get(timeout=HANG_S) for _ in starts)
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
    write_atomically(paths.attempt(attempt) / "heartbeat", b"1")
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


def put_special(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_what_lies_in_the_place_of_a_file_is_neither_waited_for_nor_read(tmp_path: Path, kind: str) -> None:
    put_special(tmp_path / "it", kind)
    with pytest.raises(OSError, match=r"is not a regular file|has more than 256 MiB"):
        read_or_none(tmp_path / "it")
    if kind == "endless":
        assert not create_exclusively(tmp_path / "it", b"mine")
    else:
        with pytest.raises(OSError, match="is not a regular file"):
            create_exclusively(tmp_path / "it", b"mine")
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def resealed(text: str) -> bytes:
    return f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "{}", '{"attempt": "1"}', "1"])
def test_a_well_sealed_text_that_is_no_record_is_none(text: str) -> None:
    assert unsealed_any(resealed(text)) is None


def test_strange_names_and_numbers_in_a_ledger_are_ignored(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_record(paths, 3, STARTED, {"committed": 5})
    for folder in (paths.claims, tmp_path / "attempts"):
        for name in ("\u00b2", "\u0663", "9" * 200, "-1", "1e3", "3.5"):
            (folder / name).mkdir(parents=True)
    for number in ([1], "x", None, 1.5, True):
        write_record(paths, 4, COMMITTED, {"iteration": number})
        assert known_commit(paths) == (5, 3)
    assert (newest_attempt(paths), [each.number for each in started_attempts(paths)]) == (0, [3])
    put_special(paths.attempt(5) / COMMITTED, "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        known_commit(paths)
