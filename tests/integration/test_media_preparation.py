"""Preparation by real processors: the bytes are the processor's pixels, and another preparation another name.

In this folder because it imports transformers' image processors, which takes seconds.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.pictures import picture, pixels
from tests.tiny_processors import FAMILIES, MEAN, STD, write_processor
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.adapters.node_local.media_file import media_digest
from yatt.adapters.node_local.prepared_media import PreparedMedia, as_tiles
from yatt.errors import ConfigError
from yatt.media import prepare
from yatt.media.prepare import PatchPreparation, load_preparation

SIZES = [(90, 130), (28, 28), (300, 41), (17, 200), (640, 480)]


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "internvl"])
def test_bytes_normalised_later_are_the_processors_own_pixels(tmp_path: Path, family: str) -> None:
    """By an independent call of the processor with its defaults, which rescales and normalises itself."""
    from transformers import AutoImageProcessor

    folder = write_processor(tmp_path, family)
    reference = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
    preparation = load_preparation(folder)
    patch = FAMILIES[family][1]
    for width, height in SIZES:
        grid, patches = preparation.patches_of(noise(width, height))
        expected = reference(images=[noise(width, height)], return_tensors="pt")
        assert list(grid) == expected["image_grid_thw"][0].tolist()
        assert patches.dtype == np.uint8 and patches.shape == (math.prod(grid), 3 * patch * patch)
        planes = torch.from_numpy(patches).view(len(patches), 3, 1, -1).float() / 255
        normal = (planes - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        whole = normal.expand(-1, -1, 2, -1).reshape(len(patches), -1)
        assert (whole - expected["pixel_values"]).abs().max() < 1e-5


def test_tiles_normalised_later_are_the_processors_own_pixels(tmp_path: Path) -> None:
    """Released folders say that nothing is cut, and their processor cuts all the same."""
    from transformers import AutoImageProcessor

    folder = write_processor(tmp_path, "internvl", crop_to_patches=False)
    reference = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
    preparation, numbers = load_preparation(folder), set()
    for width, height in SIZES:
        grid, patches = preparation.patches_of(noise(width, height))
        expected = reference(images=[noise(width, height)], crop_to_patches=True, return_tensors="pt")
        assert grid == (expected["num_patches"][0], 4, 4)
        tiles = torch.from_numpy(as_tiles(PreparedMedia(grid, patches))).float() / 255
        normal = (tiles - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        assert (normal - expected["pixel_values"]).abs().max() < 1e-5
        numbers.add(grid[0])
    assert numbers == {1, 3, 5}
    limited = load_preparation(folder, max_pixels=3 * 56 * 56 - 1)
    assert limited.digest != preparation.digest
    assert limited.patches_of(noise(300, 41))[0] == (3, 4, 4), "two, and the whole picture"


def test_another_preparation_of_a_file_has_another_name(tmp_path: Path) -> None:
    given = load_preparation(write_processor(tmp_path / "a"))
    same = load_preparation(write_processor(tmp_path / "b"))
    smaller = load_preparation(tmp_path / "a", max_pixels=64 * 64)
    other_mean = load_preparation(write_processor(tmp_path / "c", image_mean=[0.5, 0.5, 0.5]))
    other_patch = load_preparation(write_processor(tmp_path / "d", "qwen2_5_vl"))
    digests = [each.digest for each in (given, smaller, other_mean, other_patch)]
    assert given.digest == same.digest and len(set(digests)) == 4
    assert len({media_digest("0" * 64, digest) for digest in digests}) == 4
    assert math.prod(smaller.patches_of(noise(200, 200))[0]) < math.prod(given.patches_of(noise(200, 200))[0])


def test_limits_of_the_config_are_those_of_the_processor(tmp_path: Path) -> None:
    preparation = load_preparation(write_processor(tmp_path), min_pixels=128 * 128, max_pixels=160 * 160)
    for width, height in SIZES:
        grid, _ = preparation.patches_of(noise(width, height))
        assert 128 * 128 <= math.prod(grid) * 256 <= 160 * 160 * 1.3


def test_a_picture_that_is_too_narrow_is_refused(tmp_path: Path) -> None:
    """The first test of this module imports the processors; no whole run is needed."""
    with pytest.raises(MediaRefused, match="aspect ratio"):
        load_preparation(write_processor(tmp_path)).patches_of(picture(5, 2000))


def test_a_folder_without_a_processor_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .* has no picture processor that can be used"):
        load_preparation(tmp_path)


def test_a_processor_of_another_form_is_refused(tmp_path: Path) -> None:
    """InternVL's in a folder of another family: tiles instead of patches with a grid."""
    write_processor(tmp_path, image_processor_type="GotOcr2ImageProcessor", size={"height": 56, "width": 56})
    with pytest.raises(ConfigError, match="has no picture processor that can be used"):
        load_preparation(tmp_path)


class Wrong:
    """A processor with a planted mistake in its result."""

    def __init__(self, processor: object, change: str) -> None:
        self._processor, self._change = processor, change
        self.patch_size, self.temporal_patch_size = processor.patch_size, processor.temporal_patch_size

    def to_dict(self) -> dict:
        return {}

    def __call__(self, **arguments: object) -> dict:
        if self._change == "normalised":
            arguments |= {"do_rescale": True, "do_normalize": True}
        made = self._processor(**arguments)
        values = made["pixel_values"].clone()
        if self._change == "second frame":
            values[0, -1] ^= 1
        return {"pixel_values": values, "image_grid_thw": made["image_grid_thw"] + (self._change == "grid")}


@pytest.mark.parametrize("change", ["normalised", "second frame", "grid"])
def test_a_result_that_bytes_cannot_hold_is_never_kept(tmp_path: Path, change: str) -> None:
    processor = load_preparation(write_processor(tmp_path)).processor
    with pytest.raises(ValueError, match="the processor's"):
        PatchPreparation(Wrong(processor, change)).patches_of(Image.fromarray(pixels(64, 64)))


def test_new_rules_of_decoding_have_new_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_processor(tmp_path)
    before = load_preparation(folder).digest
    monkeypatch.setattr(prepare, "RULES", prepare.RULES + 1)
    assert load_preparation(folder).digest != before
