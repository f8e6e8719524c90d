"""Decoding: orientation, transparency, palettes, 16 bits, CMYK, animations; refusals in one sentence."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.pictures import FORMATS, encoded, good_files, grey_16, hostile_files, picture, pixels, turned
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.media import decode
from yatt.media.decode import decode_picture

MOST = 64 << 20


def decoded(data: bytes) -> np.ndarray:
    found = decode_picture(data, MOST)
    assert found.mode == "RGB"
    return np.asarray(found)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_plain_picture_is_as_pil_decodes_it(kind: str) -> None:
    data = FORMATS[kind](37, 22, 3)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decoded(data), expected)
    assert np.abs(decoded(data).astype(int) - pixels(37, 22, 3)).mean() < 12


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_by_each_orientation(orientation: int) -> None:
    data = encoded(picture(37, 22), "JPEG", exif=turned(orientation))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decoded(data), np.asarray(expected))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white_and_half_transparent_ones_between(mode: str) -> None:
    rgba = np.zeros((2, 3, 4), np.uint8)
    rgba[..., 0] = 200
    rgba[0, :, 3] = (0, 255, 128)
    rgba[1, :, 3] = 255
    image = Image.fromarray(rgba)
    if mode == "LA":
        image = image.convert("LA")
    if mode == "P":
        image = image.quantize(8)
    data = encoded(image, "PNG")
    shown = Image.alpha_composite(
        Image.new("RGBA", (3, 2), "white"), Image.open(io.BytesIO(data)).convert("RGBA")
    )
    found = decoded(data)
    assert np.abs(found.astype(int) - np.asarray(shown.convert("RGB"))).max() <= 1
    assert (found[0, 0] == 255).all()


def test_a_palette_with_a_transparent_entry_is_white_there() -> None:
    image = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8)).convert("P")
    image.putpalette([255, 0, 0, 0, 0, 255])
    found = decoded(encoded(image, "PNG", transparency=0))
    assert found.tolist() == [[[255] * 3, [0, 0, 255]], [[0, 0, 255], [255] * 3]]


def test_16_bits_are_scaled_and_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([[0, 255, 256, 40000, 65535]], np.uint16)
    assert decoded(grey_16(values))[0, :, 0].tolist() == [0, 0, 1, 156, 255]
    monkeypatch.setattr(decode, "_from_16_bits", lambda image: image.convert("RGB"))  # planted
    assert decoded(grey_16(values))[0, :, 0].tolist() != [0, 0, 1, 156, 255]


def test_ink_colours_become_the_same_colours() -> None:
    flat = Image.new("RGB", (16, 16), (200, 40, 90))
    found = decoded(encoded(flat.convert("CMYK"), "JPEG", quality=95))
    assert np.abs(found.astype(int) - np.array([200, 40, 90])).max() <= 6


@pytest.mark.parametrize("name", ["animated.gif", "animated.webp"])
def test_of_an_animation_the_first_frame_is_taken(name: str) -> None:
    data, _ = good_files()[name]
    first = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decoded(data), first)
    assert np.abs(decoded(data).astype(int) - pixels(40, 30, 0)).mean() < 25


HOSTILE = hostile_files()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_one_sentence(name: str) -> None:
    with pytest.raises(MediaRefused) as found:
        decode_picture(HOSTILE[name], MOST)
    assert "\n" not in str(found.value) and len(str(found.value)) < 300


def test_a_frame_larger_than_its_head_is_refused() -> None:
    data = bytearray(encoded(picture(40, 30), "GIF"))
    data[6:10] = b"\x02\x00\x02\x00"
    with pytest.raises(MediaRefused, match="says 2 x 2 pixels, but its frame has 40 x 30"):
        decode_picture(bytes(data), MOST)


def test_memory_that_is_refused_is_the_pictures_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decode, "_decoded", without_memory)
    with pytest.raises(MediaRefused, match="memory"):
        decode_picture(encoded(picture(4, 4), "PNG"), MOST)
