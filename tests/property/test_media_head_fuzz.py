"""Head reader and decoder on damaged files: their own fault, or a right answer; nothing else is raised."""

import io

import pytest
from hypothesis import given, strategies as st
from PIL import Image

from tests.pictures import FORMATS, encoded, picture, turned
from yatt.adapters.inputs.media_head import MediaRefused, head_of_bytes
from yatt.media.decode import decode_picture

WHOLE = [made(33, 21, seed) for made in FORMATS.values() for seed in (0, 1)]
WHOLE += [encoded(picture(33, 21), kind, exif=turned(6)) for kind in ("JPEG", "PNG", "WEBP")]
MOST = 1 << 16


@given(st.binary(max_size=300), st.sampled_from(["", *FORMATS]))
def test_random_bytes_after_a_magic_are_a_fault_or_a_head(data: bytes, kind: str) -> None:
    if kind:
        data = FORMATS[kind](3, 2, 0)[:12] + data
    try:
        head = head_of_bytes(data)
    except MediaRefused:
        return
    assert head.width > 0 and head.height > 0 and 1 <= head.orientation <= 8


@given(st.data())
def test_a_changed_picture_is_decoded_at_the_size_of_its_head_or_refused(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(WHOLE)))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(1, len(content)))]
    try:
        head = head_of_bytes(bytes(content))
        found = decode_picture(bytes(content), MOST)
    except MediaRefused:
        return
    assert found.size == head.shown_size and found.mode == "RGB"


def test_an_orientation_that_the_head_does_not_read_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the head of a turned picture without its orientation has another size than PIL shows."""
    from PIL import ImageOps

    from yatt.adapters.inputs import media_head

    data = encoded(picture(30, 20), "JPEG", exif=turned(6))
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size
    assert head_of_bytes(data).shown_size == shown
    monkeypatch.setattr(media_head, "_orientation", lambda _: 1)
    assert head_of_bytes(data).shown_size != shown
