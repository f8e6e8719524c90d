"""References to files: what a data row may name, and what is read."""

import hashlib
from pathlib import Path

import pytest

from yatt.adapters import media
from yatt.adapters.media import media_of, read_media
from yatt.errors import ConfigError
from yatt.records.message import MediaRef

DIGEST = hashlib.sha256(b"image").hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "media" / "deep").mkdir(parents=True)
    (tmp_path / "media" / "deep" / "a.png").write_bytes(b"image")
    (tmp_path / "secret").write_text("of somebody")
    return tmp_path / "media"


def test_a_column_is_a_path_a_record_or_a_list_of_them() -> None:
    assert media_of(None, "row") == ()
    assert media_of("deep/a.png", "row") == (MediaRef("deep/a.png"),)
    assert media_of([{"path": "a", "sha256": DIGEST}, "b"], "row") == (MediaRef("a", DIGEST), MediaRef("b"))


@pytest.mark.parametrize(
    "value",
    [5, "", {"url": "x"}, [["a"]], {"path": "a", "sha256": 5}, "/etc/passwd", "../secret", "a/../../b"],
)
def test_anything_else_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(ConfigError, match=r"row 3: data\.media_key: "):
        media_of(value, "row 3")


def test_a_file_is_read_and_its_digest_compared(root: Path) -> None:
    assert read_media(str(root), MediaRef("deep/a.png", DIGEST)) == b"image"
    assert read_media(str(root), MediaRef("deep/a.png")) == b"image"
    with pytest.raises(ValueError, match="its SHA-256 differs"):
        read_media(str(root), MediaRef("deep/a.png", "00" * 32))
    with pytest.raises(FileNotFoundError):
        read_media(str(root), MediaRef("deep/b.png"))


def test_no_link_leads_out_of_the_folder(root: Path) -> None:
    (root / "link.png").symlink_to(root.parent / "secret")
    (root / "folder").symlink_to(root.parent)
    for path in ("link.png", "folder/secret", "../secret"):
        with pytest.raises(ValueError, match=r"leads out of data\.media_root"):
            read_media(str(root), MediaRef(path))


def test_a_file_that_is_too_large_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MOST_BYTES", 4)
    with pytest.raises(ValueError, match="has more than 4 bytes"):
        read_media(str(root), MediaRef("deep/a.png"))
