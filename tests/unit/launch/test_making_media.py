"""Rows with pictures: what verl's files have, what is refused, and what a made row says."""

import base64
import hashlib
import json
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from tests.runs import HANG_S
from tests.tiny_processors import write_processor
from yatt.adapters.files.patience import exit_code_of
from yatt.adapters.inputs.data_rows import raw_rows
from yatt.adapters.inputs.dataset import check_rows, read_data_rows
from yatt.config.schema import DataSection
from yatt.errors import EXIT_USER_MISTAKE, ConfigError
from yatt.launch.resolve.making_media import MediaMaking, write_with_references
from yatt.media.fetch import MediaSources
from yatt.records.media import MediaItem

VIDEO = {"fps": 2.0, "max_frames": 64}
PROMPT = [{"role": "user", "content": "What is in <image>?"}]


def png(path: Path, size: tuple[int, int] = (40, 30), colour: str = "red") -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path.read_bytes()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    png(tmp_path / "root" / "deep" / "a.png")
    (tmp_path / "secret.png").write_bytes((tmp_path / "root" / "deep" / "a.png").read_bytes())
    return tmp_path / "root"


@pytest.fixture
def making(tmp_path: Path, root: Path) -> MediaMaking:
    return MediaMaking(
        image_key="images", video_key="videos", columns=None, root=str(root),
        store=str(tmp_path / "store"), most_pixels=100_000, most_per_prompt=3, video=VIDEO,
        model=str(write_processor(tmp_path / "model", "qwen2_5_vl")),
    )  # fmt: skip


def file_of(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    """A parquet file if a row has bytes, else a JSONL file."""
    try:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
    except TypeError:
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), tmp_path / "rows.parquet")
        return tmp_path / "rows.parquet"
    (tmp_path / "rows.jsonl").write_text(lines)
    return tmp_path / "rows.jsonl"


def made(tmp_path: Path, making: MediaMaking, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [raw for raw, _ in raw_rows(made_file(tmp_path, making, *rows))]


def made_file(tmp_path: Path, making: MediaMaking, *rows: dict[str, Any]) -> Path:
    source = file_of(tmp_path, *rows)
    target = source.with_name(f"made-{secrets.token_hex(4)}{source.suffix}")
    write_with_references(source, making, target)
    return target


def test_bytes_become_files_once_and_paths_become_references(
    tmp_path: Path, root: Path, making: MediaMaking
) -> None:
    content = (root / "deep" / "a.png").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    other = png(tmp_path / "other.png", (20, 50))
    rows = made(
        tmp_path, making,
        {"prompt": PROMPT, "images": [{"bytes": content, "path": None}], "answer": 1},
        {"prompt": PROMPT, "images": [{"bytes": content, "path": "ignored.png"}], "answer": 2},
        {"prompt": PROMPT, "images": [{"bytes": other, "path": None}], "answer": 3},
        {"prompt": PROMPT, "images": [{"bytes": None, "path": "deep/a.png"}], "answer": 4},
    )  # fmt: skip
    stored = {"path": "", "sha256": digest, "width": 40, "height": 30}
    assert [row["images"] for row in rows] == [
        [stored], [stored],
        [{"path": "", "sha256": hashlib.sha256(other).hexdigest(), "width": 20, "height": 50}],
        [stored | {"path": "deep/a.png"}],
    ]  # fmt: skip
    assert [row["answer"] for row in rows] == [1, 2, 3, 4], "in the order of the file"
    files = [path for path in Path(making.store).rglob("*") if path.is_file()]
    assert len(files) == 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in Path(making.store).rglob("*") if path.is_dir())


def forms(content: bytes, root: Path) -> list[Any]:
    inline = "data:image/png;base64," + base64.b64encode(content).decode()
    absolute = str(root / "deep" / "a.png")
    return [
        "deep/a.png", "deep/../deep/a.png", absolute, f"file://{absolute}", inline,
        {"path": "deep/a.png"}, {"path": "deep/a.png", "sha256": hashlib.sha256(content).hexdigest()},
        {"image": "deep/a.png"}, {"image": inline}, {"image": f"file://{absolute}"},
    ]  # fmt: skip


def test_every_form_of_a_picture_that_verl_and_its_users_write_is_read(
    tmp_path: Path, root: Path, making: MediaMaking
) -> None:
    content = (root / "deep" / "a.png").read_bytes()
    for form in forms(content, root):
        for images in ([form], form):
            (row,) = made(tmp_path, making, {"prompt": PROMPT, "images": images})
            (found,) = row["images"]
            assert found["sha256"] == hashlib.sha256(content).hexdigest(), form
            assert found["path"] in ("deep/a.png", ""), form


def test_the_size_is_that_of_the_picture_as_it_is_shown(
    tmp_path: Path, root: Path, making: MediaMaking
) -> None:
    picture, exif = Image.new("RGB", (40, 20)), Image.Exif()
    exif[0x0112] = 6
    picture.save(root / "turned.jpg", exif=exif)
    (row,) = made(tmp_path, making, {"prompt": PROMPT, "images": ["turned.jpg"]})
    assert (row["images"][0]["width"], row["images"][0]["height"]) == (20, 40)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("none.png", "row 1: picture 1: none.png does not exist below data.media_root"),
        ("../secret.png", "../secret.png is not a path below data.media_root"),
        ("/etc/passwd", "/etc/passwd is not a path below data.media_root"),
        ("link.png", "link.png leads out of data.media_root"),
        ("deep", "deep cannot be read"),
        ("fifo", "fifo cannot be read"),
        ("https://x.org/a.png", "is an address: rows name files only"),
        ("text.png", "text.png"),
        ("large.png", "has 400 x 300 pixels, more than media.most_pixels"),
        ({"path": "deep/a.png", "sha256": "00" * 32}, "its SHA-256 differs"),
        ("data:image/png;base64,%%%", "cannot be read as data:image"),
        (7, "7 is neither a path nor bytes"),
        ({"url": "x"}, "is neither a path nor bytes"),
        ("", "'' is neither a path nor bytes"),
        ("a\x1b[2Jb", "a\\x1b[2Jb does not exist"),
        ("iVBORw0KGgo" * 10_000, " is too long for a path; write pictures in base64"),
    ],
)
def test_a_picture_that_cannot_be_used_is_refused_with_its_place(
    tmp_path: Path, root: Path, making: MediaMaking, entry: object, says: str
) -> None:
    (root / "link.png").symlink_to(root.parent / "secret.png")
    (root / "text.png").write_text("<html>not found</html>")
    os.mkfifo(root / "fifo")
    png(root / "large.png", (400, 300))
    with pytest.raises(ConfigError) as found:
        made(tmp_path, making, {"prompt": PROMPT, "images": [entry]})
    assert says in str(found.value)
    assert f"{tmp_path / 'rows.jsonl'}: row 1" in str(found.value)
    assert len(str(found.value)) < 1000


def test_the_first_places_of_each_kind_of_fault_are_named(tmp_path: Path, making: MediaMaking) -> None:
    rows = [{"prompt": PROMPT, "images": [f"none-{number}.png"]} for number in range(200)]
    rows[100]["images"] = ["deep/a.png"] * 4
    rows[150] = {"prompt": PROMPT, "videos": ["a.mp4"]}
    with pytest.raises(ConfigError) as found:
        made(tmp_path, making, *rows)
    says = str(found.value)
    assert says.startswith("200 rows have pictures that cannot be used:")
    assert says.count("does not exist") == 3 and "none-2.png" in says
    assert "row 101: has 4 pictures, more than media.most_per_prompt (3)" in says
    assert "row 151: column 'videos' has videos; model.path: " in says and "not 'qwen2_5_vl'" in says
    assert "and 195 more like these" in says


def test_a_made_row_is_read_and_its_file_is_the_one_that_it_names(
    tmp_path: Path, root: Path, making: MediaMaking
) -> None:
    content = (root / "deep" / "a.png").read_bytes()
    file = made_file(
        tmp_path, making,
        {"prompt": PROMPT, "images": [{"bytes": content, "path": None}]},
        {"prompt": [{"role": "user", "content": "none here"}], "images": None},
    )  # fmt: skip
    data = DataSection(train_files=(str(file),), media_store=making.store)
    first, second = (row for row, _ in read_data_rows(data.train_files, data))
    assert (len(first.media), second.media) == (1, ())
    (ref,) = first.media
    sources = MediaSources(making.root, making.store, {}, HANG_S)
    with sources.opened_source(MediaItem(ref.path, ref.sha256)) as source:
        assert source.content(ref.sha256) == content
    without = DataSection(train_files=(str(file),))
    assert [row.media for row, _ in read_data_rows(without.train_files, without)] == [(), ()]


@pytest.mark.parametrize(
    ("content", "num_pictures", "says"),
    [
        ("What is it?", 1, "has 0 times <image>, but column 'images' has 1 pictures"),
        ("<image> and <image>", 1, "has 2 times <image>"),
        ("<image>", 0, "has 1 times <image>, but column 'images' has 0 pictures"),
        ([{"type": "image"}, {"type": "text", "text": "a <image>"}], 1, "has 2 times <image>"),
        ([{"type": "image"}, {"type": "audio"}], 1, "has an unreadable prompt"),
        ([{"type": "image", "text": None}, {"type": "text", "text": "a", "image": None}], 1, ""),
        ("<image>a<image>", 2, ""),
    ],
)
def test_marks_and_pictures_are_counted(
    tmp_path: Path, content: object, num_pictures: int, says: str
) -> None:
    reference = {"path": "", "sha256": "ab" * 32, "width": 3, "height": 4}
    row = {"prompt": [{"role": "user", "content": content}], "images": [reference] * num_pictures}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data = DataSection(train_files=(str(tmp_path / "rows.jsonl"),), media_store="store")
    if not says:
        assert check_rows(data.train_files, data).rows == 1
        return
    with pytest.raises(ConfigError, match=says):
        check_rows(data.train_files, data)


def test_a_root_that_is_a_link_has_the_files_of_its_folder(
    tmp_path: Path, root: Path, making: MediaMaking
) -> None:
    (tmp_path / "link").symlink_to(root)
    linked = replace(making, root=str(tmp_path / "link"))
    for path in (tmp_path / "link" / "deep" / "a.png", root / "deep" / "a.png"):
        (row,) = made(tmp_path, linked, {"prompt": PROMPT, "images": [str(path)]})
        assert row["images"][0]["path"] == "deep/a.png"


def test_a_store_that_is_away_is_no_mistake_of_the_user(
    tmp_path: Path, making: MediaMaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    away = {"endpoint_url": "http://127.0.0.1:9"}
    far = replace(making, root="s3://bucket/pictures", storage_options=away)
    with pytest.raises(ConfigError, match=r"data\.media_root: s3://bucket/pictures cannot be read") as found:
        made(tmp_path, far, {"prompt": PROMPT, "images": ["a.png"]})
    assert exit_code_of(found.value) != EXIT_USER_MISTAKE
