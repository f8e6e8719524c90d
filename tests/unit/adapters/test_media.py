"""References to pictures: what a made row may name, and what is read."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from yatt.adapters.inputs.media import media_of, open_media
from yatt.errors import ConfigError
from yatt.records.message import MediaRef

DIGEST = hashlib.sha256(b"image").hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "media" / "deep").mkdir(parents=True)
    (tmp_path / "media" / "deep" / "a.png").write_bytes(b"image")
    (tmp_path / "secret").write_bytes(b"image")
    return tmp_path / "media"


def reference(**changed: Any) -> dict[str, Any]:
    return {"path": "deep/a.png", "sha256": DIGEST, "width": 4, "height": 3} | changed


def test_a_column_is_a_list_of_references() -> None:
    assert media_of(None, "row") == ()
    assert media_of([], "row") == ()
    expected = MediaRef("deep/a.png", DIGEST, 4, 3), MediaRef("", DIGEST, 4, 9)
    assert media_of([reference(), reference(path="", height=9)], "row") == expected


@pytest.mark.parametrize(
    "value",
    [
        5, "a.png", reference(), [["a"]], [reference(more=1)], [reference(sha256="")], [reference(width=0)],
        [reference(sha256=DIGEST.upper())], [reference(sha256="../../../etc/passwd")], [reference(width="4")],
        [reference(path="/etc/passwd")], [reference(path="../secret")], [reference(path="a/../../b")],
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(ConfigError, match=r"row 3: data\.image_key: "):
        media_of(value, "row 3")


def test_a_file_below_the_folder_is_opened(root: Path) -> None:
    with open_media(str(root), "deep/a.png") as file:
        assert file.read() == b"image"
    with pytest.raises(FileNotFoundError):
        open_media(str(root), "deep/b.png")


def test_no_link_leads_out_of_the_folder(root: Path) -> None:
    (root / "link.png").symlink_to(root.parent / "secret")
    (root / "folder").symlink_to(root.parent)
    for path in ("link.png", "folder/secret", "../secret"):
        with pytest.raises(ValueError, match=r"leads out of data\.media_root"):
            open_media(str(root), path)
