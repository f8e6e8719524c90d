"""Pictures encoded for judges behind URLs and for pages: limits of pixels and bytes, and what is lost."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.pictures import noise, picture, pixels
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.media.encoding import MOST_SIDE, PictureEncoding

FREE = PictureEncoding(1 << 20, 1 << 20)


def made(encoding: PictureEncoding, image: Image.Image) -> Image.Image:
    """The encoded picture, decoded."""
    grid, patches = encoding.patches_of(image)
    assert grid == (1, 1, len(patches)) and patches.dtype == np.uint8 and patches.shape[1] == 1
    assert len(patches) <= encoding.most_bytes
    found = Image.open(io.BytesIO(patches.tobytes()))
    assert found.format == "JPEG" and found.width * found.height <= encoding.most_pixels
    return found.convert("RGB")


def test_a_picture_within_the_limits_keeps_its_size_and_colours() -> None:
    found = made(FREE, picture(96, 64, 3))
    assert found.size == (96, 64)
    assert np.abs(np.asarray(found).astype(int) - pixels(96, 64, 3)).max() <= 8


def test_a_large_picture_is_made_smaller_and_keeps_its_ratio() -> None:
    found = made(PictureEncoding(96 * 64, 1 << 20), picture(300, 200, 1))
    assert found.size == (96, 64)
    assert np.abs(np.asarray(found).astype(int) - pixels(96, 64, 1)).mean() <= 3


def test_a_long_strip_keeps_a_side_of_one_pixel() -> None:
    found = made(FREE, Image.new("RGB", (70_000, 2), "red"))
    assert found.size == (MOST_SIDE, 1)
    assert made(PictureEncoding(100, 1 << 20), Image.new("RGB", (10, 4000), "red")).size == (1, 100)
    assert made(PictureEncoding(1000, 1 << 20), Image.new("RGB", (40_000, 2), "red")).size == (1000, 1)


def test_quality_then_size_is_lowered_until_the_bytes_fit() -> None:
    image = noise(200, 100)
    sizes = {most: made(PictureEncoding(1 << 20, most), image).size for most in (30_000, 12_000, 2_000)}
    assert sizes[30_000] == sizes[12_000] == (200, 100), "a lower quality is enough"
    assert sizes[2_000] in ((100, 50), (50, 25))


def test_what_never_fits_is_the_pictures_fault() -> None:
    with pytest.raises(MediaRefused, match="does not fit into 300 bytes as a JPEG file"):
        PictureEncoding(1 << 20, 300).patches_of(noise(64, 64))


def test_other_limits_have_another_name() -> None:
    all_of_them = [FREE, PictureEncoding(1 << 20, 1 << 19), PictureEncoding(1 << 19, 1 << 20)]
    assert len({each.digest for each in all_of_them}) == 3
    assert FREE.digest == PictureEncoding(1 << 20, 1 << 20).digest
