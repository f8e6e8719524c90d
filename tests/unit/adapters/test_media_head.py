"""The head reader: sizes and orientations as PIL has them, refusals with the cause, bounded work."""

import contextlib
import io
import random
import struct
from pathlib import Path

import pytest
from PIL import Image

from tests.pictures import (
    FORMATS,
    ORIENTATION,
    encoded,
    good_files,
    hostile_files,
    picture,
    png_chunk,
    png_head,
    turned,
)
from yatt.adapters.inputs.media_head import (
    MOST_PART_BYTES,
    MOST_PARTS,
    MediaHead,
    MediaRefused,
    head_by_parts,
    head_of_bytes,
    head_of_file,
    refuse_pixels,
)


@pytest.mark.parametrize("kind", FORMATS)
def test_sizes_of_many_files_are_those_of_pil(kind: str, tmp_path: Path) -> None:
    rnd = random.Random(kind)
    for seed in range(60):
        data = FORMATS[kind](rnd.randint(1, 90), rnd.randint(1, 90), seed)
        expected = Image.open(io.BytesIO(data))
        head = head_of_bytes(data)
        assert (head.kind, head.width, head.height) == (kind, *expected.size)
        path = tmp_path / "one"
        path.write_bytes(data)
        assert head_of_file(path) == head


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations_are_those_of_pil(kind: str, orientation: int) -> None:
    data = encoded(picture(30, 20), kind, exif=turned(orientation))
    head = head_of_bytes(data)
    assert head.orientation == Image.open(io.BytesIO(data)).getexif()[ORIENTATION] == orientation
    assert head.shown_size == ((20, 30) if orientation >= 5 else (30, 20))


def test_a_picture_without_exif_is_not_turned() -> None:
    assert head_of_bytes(encoded(picture(30, 20), "JPEG")) == MediaHead("JPEG", 30, 20, 1)


def test_a_size_behind_many_long_segments_is_found_by_small_reads(tmp_path: Path) -> None:
    data = encoded(picture(30, 20), "JPEG")
    long = b"\xff\xe2" + struct.pack(">H", 0xFFFF) + bytes(0xFFFD)
    path = tmp_path / "one"
    path.write_bytes(data[:2] + 40 * long + data[2:])
    assert head_of_file(path) == MediaHead("JPEG", 30, 20)


@pytest.mark.parametrize("name", sorted(set(hostile_files()) - {"bomb.png", "larger-bomb.png"}))
def test_what_is_no_picture_is_refused_or_left_to_the_decoder(name: str) -> None:
    data = HOSTILE[name]
    decoder_finds = {"cut.png", "head-only.png", "huge-head.png", "loud.gif", "cut.jpg"}
    if name in decoder_finds:
        assert head_of_bytes(data).num_pixels > 0
        return
    with pytest.raises(MediaRefused, match=WORDS[name]):
        head_of_bytes(data)


HOSTILE = hostile_files()
WORDS = {
    "empty.png": "is empty", "drawing.png": "SVG", "page.jpg": "HTML", "text.png": "is not a picture",
    "zero-size.png": "no pixels", "zeros.bmp": "is not a picture", "archive.gif": "zip",
    "pointer.png": "git-lfs", "tiff.jpg": "TIFF",
}  # fmt: skip


def test_a_picture_with_too_many_pixels_is_refused_by_its_head() -> None:
    head = head_of_bytes(HOSTILE["huge-head.png"])
    with pytest.raises(MediaRefused, match=r"2147483647 x 2147483647 pixels, more than media\.most_pixels"):
        refuse_pixels(head, 64 << 20)
    refuse_pixels(MediaHead("PNG", 8192, 8192), 64 << 20)


@pytest.mark.parametrize("bits", [12])
def test_a_jpeg_of_more_bits_is_refused(bits: int) -> None:
    data = bytearray(encoded(picture(30, 20), "JPEG"))
    place = data.index(b"\xff\xc0")
    data[place + 4] = bits
    with pytest.raises(MediaRefused, match="12 bits"):
        head_of_bytes(bytes(data))


def test_a_file_of_segments_only_costs_a_bounded_number_of_small_reads() -> None:
    """Also one that says that its parts are long, and a PNG of chunks only."""
    endless = b"\xff\xd8" + b"\xff\xe1\x00\x02" * 100_000
    fills = b"\xff\xd8\xff" + b"\xff" * 100_000
    chunks = png_head(3, 3) + png_chunk(b"tEXt", b"") * 100_000
    for data in (endless, fills, chunks, b"RIFF\0\0\0\0WEBPVP8X" + b"\x0a\0\0\0\x08" + bytes(10**5)):
        reads = []

        def read_at(offset: int, size: int, data: bytes = data, reads: list[int] = reads) -> bytes:
            reads.append(size)
            return data[offset : offset + size]

        with contextlib.suppress(MediaRefused):
            head_by_parts(read_at)
        assert len(reads) <= 4 * MOST_PARTS and max(reads) <= MOST_PART_BYTES


def test_no_head_reader_needs_an_image_library(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, yatt.adapters.inputs.media_head; assert not {'PIL', 'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unusual_pictures_have_heads() -> None:
    for data, size in good_files().values():
        assert head_of_bytes(data).shown_size == size
