"""A segment's stamp: what a reader may believe while the writer works, and what costs an error."""

import errno
import os
from pathlib import Path

import pytest

from yatt.adapters.node_local import host_segment
from yatt.adapters.node_local.host_segment import (
    HEADER_BYTES,
    SegmentReader,
    SegmentWriter,
    Stamp,
    aligned_size,
)
from yatt.errors import ConfigError, WorkerFailed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.weights"


def test_a_reader_sees_the_writers_bytes_and_their_stamp(path: Path) -> None:
    writer = SegmentWriter(path, 100)
    reader = SegmentReader(path)
    assert reader.stamp() is None, "nothing was written yet"
    writer.data[:3] = b"abc"
    writer.complete(Stamp(7, 3))
    assert (bytes(reader.data[:3]), reader.stamp()) == (b"abc", Stamp(7, 3))
    assert len(reader.data) == 100
    reader.close()


def test_a_stamp_is_invalid_from_the_first_changed_byte_to_the_last(path: Path) -> None:
    writer = SegmentWriter(path, 10)
    reader = SegmentReader(path)
    writer.complete(Stamp(1, 1))
    for version in (2, 3):
        writer.invalidate()
        writer.invalidate()
        assert reader.stamp() is None and not reader.is_still(Stamp(1, version - 1))
        with pytest.raises(WorkerFailed, match="is being changed; version 1 of attempt 1 was asked for"):
            reader.check(Stamp(1, 1))
        writer.complete(Stamp(1, version))
        assert reader.is_still(Stamp(1, version))
    with pytest.raises(WorkerFailed, match="is version 3 of attempt 1; version 3 of attempt 2 was"):
        reader.check(Stamp(2, 3))
    reader.close()


def test_a_stamp_that_changes_between_two_looks_is_not_believed(path: Path) -> None:
    """The writer is faster than the reader: after the first look it has written a whole new version."""
    writer = SegmentWriter(path, 10)
    writer.complete(Stamp(1, 1))
    reader = SegmentReader(path)

    class Words:
        def __init__(self, words: memoryview) -> None:
            self._words = words

        def __getitem__(self, index: int) -> int:
            value = self._words[index]
            if index == host_segment._ATTEMPT_AT:
                writer.complete(Stamp(1, 2))
            return value

    words = reader._words
    reader._words = Words(words)  # type: ignore[assignment]
    assert reader.stamp() is None
    reader._words = words
    assert reader.stamp() == Stamp(1, 2)
    reader.close()


def test_what_is_no_segment_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="cannot be opened: No such file"):
        SegmentReader(path)
    path.write_bytes(b"short")
    with pytest.raises(WorkerFailed, match="is not a host copy: it has 5 bytes"):
        SegmentReader(path)
    path.write_bytes(b"x" * (2 * HEADER_BYTES))
    with pytest.raises(WorkerFailed, match="is not a host copy"):
        SegmentReader(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(WorkerFailed, match="cannot be opened"):
        SegmentReader(tmp_path / "link")


def test_a_segment_is_private_and_never_replaces_another(path: Path) -> None:
    SegmentWriter(path, 10)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        SegmentWriter(path, 10)


def test_a_full_memory_filesystem_is_named_before_anything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"launch\.shm_dir: the host copy of a trainer rank needs 3 MiB"):
        SegmentWriter(path, 3 << 20)
    assert not path.exists()


def test_sizes_are_rounded_up_to_whole_cache_lines() -> None:
    assert [aligned_size(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
