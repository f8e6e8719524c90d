"""One line an iteration, whoever else still holds the file."""

import errno
import json
import math
import os

import msgspec
import pytest
from hypothesis import given, strategies as st

from yatt.errors import StaleAttempt
from yatt.obs.metrics import STEP, RowFile, read_metric_rows, row_of_strict, strict_row


def alive():
    """The guard of the newest attempt."""


def steps(path):
    return [row[STEP] for row in read_metric_rows(path)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({STEP: i}) + "\n" for i in range(4)) + '{"torn')
    return path


def test_lines_of_repeated_iterations_go_and_so_does_a_torn_one(path):
    rows = RowFile(path, 2, alive)
    rows.append({STEP: 2})
    assert steps(path) == [0, 1, 2]
    assert b"torn" not in path.read_bytes()
    rows.close()


def test_a_ghosts_lines_do_not_get_into_its_heirs_file(path):
    stale = RowFile(path, 4, alive)
    heir = RowFile(path, 2, alive)
    os.write(stale._descriptor, b'{"training/global_step": 4}\n')  # a write that was paused before
    heir.append({STEP: 2})
    assert steps(path) == [0, 1, 2]
    stale.close()
    heir.close()


def test_a_ghost_that_puts_its_file_in_place_is_put_out_again(path):
    heir = RowFile(path, 2, alive)
    stale = RowFile(path, 1, alive)
    heir.append({STEP: 2})
    heir.append({STEP: 3})
    assert steps(path) == [0, 1, 2, 3]
    stale.close()
    heir.close()


def test_a_ghost_that_looks_before_it_writes_ends_there(path):
    newest = [1]

    def guard():
        if newest[0] > 1:
            raise StaleAttempt("attempt 2 was claimed")

    stale = RowFile(path, 4, guard)
    newest[0] = 2
    heir = RowFile(path, 2, alive)
    with pytest.raises(StaleAttempt):
        stale.append({STEP: 4})
    heir.append({STEP: 2})
    assert steps(path) == [0, 1, 2]
    stale.close()
    heir.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_rows_that_cannot_be_read_for_a_moment_are_not_taken_for_lost(path, monkeypatch, number):
    before = path.read_bytes()

    def failing(path):
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)):
        patch.setattr("yatt.adapters.files.lines.open_regular", failing)
        RowFile(path, 4, alive)
    assert path.read_bytes() == before


@given(st.dictionaries(st.text(max_size=5), st.floats() | st.integers(-(2**63), 2**63 - 1) | st.none()))
def test_a_row_comes_out_of_strict_json_with_every_number_it_had(row):
    found = row_of_strict(msgspec.json.decode(msgspec.json.encode(strict_row(row))))
    assert found.keys() == row.keys()
    assert all(
        math.isnan(found[key]) if value != value else found[key] == value for key, value in row.items()
    )
    assert json.dumps(found, sort_keys=True) == json.dumps(row, sort_keys=True)
