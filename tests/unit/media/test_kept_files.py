"""The node's files of prepared media: made once, evicted in order, taken over after a restart."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from yatt.adapters.inputs.media_head import MediaRefused
from yatt.adapters.node_local.media_file import HEAD_BYTES, hold_prepared, is_held, release_prepared
from yatt.adapters.node_local.prepared_media import open_prepared
from yatt.core.samples.kept_media import NoRoom
from yatt.media import kept
from yatt.media.kept import KeptFiles

GRID = (1, 2, 2)
PATCHES = np.arange(4 * 25, dtype=np.uint8).reshape(4, 25)
SIZE = HEAD_BYTES + PATCHES.nbytes
A, B, C = ("a" * 64, "b" * 64, "c" * 64)


def made(files: KeptFiles, order: int, digest: str) -> bool:
    """Claims a file and makes it if it is not kept; returns whether it was made."""
    with files.claimed_file(order, digest) as shape:
        if shape is None:
            files.keep_file(order, digest, GRID, PATCHES)
        return shape is None


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_is_made_once_and_read_from_the_folder(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path / "media", 3 * SIZE)
    with files.order(1):
        assert made(files, 1, A) and not made(files, 1, A)
    assert np.array_equal(open_prepared(tmp_path / "media", A).patches, PATCHES)
    assert (tmp_path / "media").stat().st_mode & 0o777 == 0o700


def test_the_least_recently_used_file_makes_room(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path, 2 * SIZE)
    for order, digest in enumerate((A, B, A, C)):
        with files.order(order):
            made(files, order, digest)
    assert names(tmp_path) == {A, C}


def test_what_an_order_needs_stays_and_another_order_waits(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path, 2 * SIZE)
    with files.order(1):
        made(files, 1, A)
        made(files, 1, B)
        with files.order(2), pytest.raises(NoRoom) as refusal:
            made(files, 2, C)
        assert not refusal.value.is_final
        with pytest.raises(MediaRefused, match=r"raise media\.cache_bytes"):
            made(files, 1, C)
    with files.order(3):
        assert made(files, 3, C)


def test_what_an_engine_is_about_to_open_stays_and_others_wait(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path, 2 * SIZE)
    with files.order(1):
        made(files, 1, A)
        made(files, 1, B)
    assert hold_prepared(tmp_path, [A], "node0/1#1") and hold_prepared(tmp_path, [B, A], "node0/2#2")
    assert not hold_prepared(tmp_path, [A, C], "node0/3#3"), "one of them was evicted: none is held"
    assert len(names(tmp_path)) == 5
    with files.order(2), pytest.raises(NoRoom) as refusal:
        made(files, 2, C)
    assert not refusal.value.is_final, "engines will have opened them"
    assert {A, B} < names(tmp_path) and len(names(tmp_path)) == 5
    KeptFiles(tmp_path, 2 * SIZE)  # a media process that is started again
    release_prepared(tmp_path, 2, "node0/2#2")
    with files.order(3):
        assert made(files, 3, C)
    assert {A, C} < names(tmp_path), "B is released, A is not"
    release_prepared(tmp_path, 1, "node0/1#1")
    assert names(tmp_path) == {A, C}


def test_a_file_that_is_held_while_it_is_taken_away_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted mistake: without the second look the engine finds no file, though it was held in time."""
    files, looks = KeptFiles(tmp_path, 2 * SIZE), list[str]()
    with files.order(1):
        made(files, 1, A)
        made(files, 1, B)

    def look(folder: Path, digest: str) -> bool:
        found = is_held(folder, digest)
        if not looks:
            assert hold_prepared(tmp_path, [A], "node0/1#1"), "between the look and the renaming"
        looks.append(digest)
        return found

    monkeypatch.setattr(kept, "is_held", look)
    with files.order(2):
        assert made(files, 2, C)
    assert {A, C} < names(tmp_path) and B not in names(tmp_path), "the next one goes"
    assert open_prepared(tmp_path, A).grid == GRID and len(names(tmp_path)) == 3


def test_a_refused_order_takes_nothing_away(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path, 3 * SIZE)
    with files.order(1):
        made(files, 1, B)
        made(files, 1, C)
    with files.order(2):
        made(files, 2, A)
    assert hold_prepared(tmp_path, [C], "1") and hold_prepared(tmp_path, [A], "2")
    with files.order(3), pytest.raises(NoRoom), files.claimed_file(3, "d" * 64):
        files.keep_file(3, "d" * 64, (1, 2, 4), np.zeros((8, 25), np.uint8))
    assert {A, B, C} < names(tmp_path) and len(names(tmp_path)) == 5


def test_two_threads_make_a_file_once(tmp_path: Path) -> None:
    files, begun, go_on = KeptFiles(tmp_path, 4 * SIZE), threading.Event(), threading.Event()
    found: list[bool] = []

    def slowly() -> None:
        with files.order(1), files.claimed_file(1, A) as shape:
            assert shape is None
            begun.set()
            go_on.wait()
            files.keep_file(1, A, GRID, PATCHES)

    def beside() -> None:
        with files.order(2):
            found.append(made(files, 2, A))

    first, second = threading.Thread(target=slowly), threading.Thread(target=beside)
    first.start()
    begun.wait()
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert found == [False]


def test_a_file_that_vanished_is_made_again(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path, 2 * SIZE)
    with files.order(1):
        made(files, 1, A)
        made(files, 1, B)
    (tmp_path / A).unlink()
    (tmp_path / B).write_bytes(b"damaged")
    with files.order(2):
        assert made(files, 2, A) and made(files, 2, B)
    assert open_prepared(tmp_path, B).grid == GRID


def test_files_of_an_earlier_process_are_taken_over_if_head_and_length_agree(tmp_path: Path) -> None:
    with (files := KeptFiles(tmp_path, 3 * SIZE)).order(1):
        for number, digest in enumerate((A, B, C)):
            made(files, 1, digest)
            os.utime(tmp_path / digest, (number, number))
    (tmp_path / B).write_bytes((tmp_path / B).read_bytes()[:-1])
    (tmp_path / (A + ".new")).write_bytes(b"half")
    (tmp_path / "notes").write_text("strange")
    again = KeptFiles(tmp_path, 2 * SIZE)
    assert names(tmp_path) == {A, C}
    with again.order(1):
        assert not made(again, 1, C)
        assert made(again, 1, B)
    assert names(tmp_path) == {C, B}, "A is the oldest"
    KeptFiles(tmp_path, SIZE)
    assert len(names(tmp_path)) == 1, "as far as they have room"


def test_a_file_that_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path, 2 * SIZE)
    (tmp_path / (A + ".new")).mkdir()
    with files.order(1), pytest.raises(FileExistsError):
        made(files, 1, A)
    (tmp_path / (A + ".new")).rmdir()
    with files.order(2):
        assert made(files, 2, A) and made(files, 2, B)
    assert names(tmp_path) == {A, B}
