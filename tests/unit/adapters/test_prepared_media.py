"""Files of prepared media: what a reader takes, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from yatt.adapters.node_local.media_file import (
    HEAD_BYTES,
    MediaShape,
    media_digest,
    media_head,
    shape_of_prepared,
)
from yatt.adapters.node_local.prepared_media import (
    PreparedMedia,
    open_prepared,
    parts_of_prepared,
    with_frames,
)

GRID, COLUMNS = (1, 4, 6), 12
DIGEST = media_digest("a" * 64, "b" * 64)
PATCHES = np.arange(24 * COLUMNS, dtype=np.int64).astype(np.uint8).reshape(24, COLUMNS)


def written(folder: Path, digest: str = DIGEST, data: bytes | None = None) -> Path:
    head = media_head(digest, MediaShape(GRID, COLUMNS))
    path = folder / digest
    path.write_bytes(head + PATCHES.tobytes() if data is None else data)
    return path


def test_a_file_is_read_as_it_was_written_and_cannot_be_changed(tmp_path: Path) -> None:
    written(tmp_path)
    found = open_prepared(tmp_path, DIGEST)
    assert found.grid == GRID and np.array_equal(found.patches, PATCHES)
    assert shape_of_prepared(tmp_path, DIGEST).size_bytes == HEAD_BYTES + PATCHES.nbytes and HEAD_BYTES == 64
    with pytest.raises(ValueError, match="read-only"):
        found.patches[0, 0] = 1


def test_who_has_mapped_a_file_keeps_it_when_it_is_evicted(tmp_path: Path) -> None:
    path = written(tmp_path)
    found = open_prepared(tmp_path, DIGEST)
    path.unlink()
    assert np.array_equal(found.patches, PATCHES)
    with pytest.raises(FileNotFoundError):
        open_prepared(tmp_path, DIGEST)


DAMAGES = {
    "another digest": lambda data: media_head("0" * 64, MediaShape(GRID, COLUMNS)) + data[64:],
    "a byte less": lambda data: data[:-1], "a byte more": lambda data: data + b"\0",
    "no head": lambda data: data[:63], "empty": lambda data: b"",
    "another magic": lambda data: b"x" + data[1:],
    "another version": lambda data: data[:8] + b"\x02" + data[9:],
    "no rows": lambda data: media_head(DIGEST, MediaShape((1, 0, 6), 12)),
    "no columns": lambda data: media_head(DIGEST, MediaShape(GRID, 0)),
    "rows that are not the grid's": lambda data: data[:12] + b"\x0c" + data[13:16] + b"\x18" + data[17:],
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_whose_head_and_length_disagree_is_refused(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(ValueError, match="head and length do not agree"):
        open_prepared(tmp_path, DIGEST)


@pytest.mark.parametrize("name", ["../secret", "", "A" * 64, "a" * 63, DIGEST + "\n"])
def test_only_a_digest_is_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        open_prepared(tmp_path, name)


def test_links_folders_and_pipes_are_not_opened(tmp_path: Path) -> None:
    outside = written(tmp_path)
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / DIGEST).symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links"):
        open_prepared(folder, DIGEST)
    os.mkfifo(folder / ("1" * 64))
    (folder / ("2" * 64)).mkdir()
    for digit in "12":
        with pytest.raises(ValueError, match="is no file"):
            open_prepared(folder, digit * 64)


@pytest.mark.parametrize(
    ("module", "without"), [("prepared_media", {"PIL", "torch"}), ("media_file", {"PIL", "torch", "numpy"})]
)
def test_a_reader_needs_neither_torch_nor_an_image_library(module: str, without: set[str]) -> None:
    code = f"import sys, yatt.adapters.node_local.{module}; assert not {without} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_video_has_both_frames_in_a_row_and_parts() -> None:
    rows = np.arange(3 * 4 * 24, dtype=np.int64).astype(np.uint8).reshape(12, 24)
    video, picture = PreparedMedia((3, 2, 2), rows), PreparedMedia((1, 4, 6), PATCHES)
    assert picture.is_still and not video.is_still
    assert [each.grid for each in parts_of_prepared(video)] == [(1, 2, 2)] * 3
    assert np.array_equal(np.concatenate([with_frames(each, 2) for each in parts_of_prepared(video)]), rows)
    (whole,) = parts_of_prepared(picture)
    planes = with_frames(whole, 2).reshape(24, 3, 2, -1)
    assert np.array_equal(planes[:, :, 0], planes[:, :, 1])
    sizes = [3 * frames * side**2 for frames in (1, 2) for side in range(1, 64)]
    still = [PreparedMedia((1, 1, 1), np.zeros((1, size), np.uint8)).is_still for size in sizes]
    assert still == [True] * 63 + [False] * 63
