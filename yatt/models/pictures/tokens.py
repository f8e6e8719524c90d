"""How a model writes pictures into prompts, from its folder: sizes in patches, and placeholder tokens.

Source: transformers' `smart_resize` of Qwen2-VL, whose processor Qwen2.5-VL and Qwen3-VL use, and of GLM-4V;
a test compares grids and ids.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from yatt.models.config_types import refused_model
from yatt.models.families import FAMILIES
from yatt.models.folder import CONFIG
from yatt.models.pictures.processor_files import MOST_NUMBER, read_processor, refuse_beyond, whole_number
from yatt.models.pictures.tiles import TileTokens, read_tiles
from yatt.plain_files import read_json_object

MOST_RATIO = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchTokens:
    """How pictures that keep their ratio become tokens: sides are multiples of `patch * merge` pixels.

    Attributes:
        mark_ids: what a chat template writes for a picture, for prompts that no template renders.
        patch: pixels of a patch's side.
        merge: patches of a token's side.
        min_pixels, max_pixels: limits of the resized picture, times its frames.
        frames: of a still picture, that count for the limits. Where they do, a picture below one token's side
            is enlarged before.
    """

    image_token_id: int
    mark_ids: tuple[int, ...]
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    frames: int = 1

    @property
    def largest_size(self) -> tuple[int, int]:
        """Width and height of a picture with the most tokens."""
        side = math.isqrt(self.max_pixels // self.frames)
        return side, side

    def grid_of(self, width: int, height: int) -> tuple[int, int, int]:
        """Returns the number of patches in time, height and width.

        Raises:
            ValueError: one side is more than `MOST_RATIO` times the other.
        """
        if max(width, height) > MOST_RATIO * min(width, height):
            raise ValueError(
                f"{width} x {height} pixels: no side may be more than {MOST_RATIO} times the other"
            )
        unit, frames = self.patch * self.merge, self.frames
        if frames > 1 and min(width, height) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        sides = [round(side / unit) * unit for side in (height, width)]
        if frames * math.prod(sides) > self.max_pixels:
            factor = math.sqrt(frames * width * height / self.max_pixels)
            sides = [max(unit, math.floor(side / factor / unit) * unit) for side in (height, width)]
        elif frames * math.prod(sides) < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (frames * width * height))
            sides = [math.ceil(side * factor / unit) * unit for side in (height, width)]
        return 1, sides[0] // self.patch, sides[1] // self.patch

    def placeholder_ids(self, grid: tuple[int, int, int]) -> list[int]:
        """Returns one token for each square of `merge` times `merge` patches."""
        return [self.image_token_id] * (math.prod(grid) // self.merge**2)

    def probe_grid(self, height: int, width: int) -> tuple[int, int, int]:
        """The grid of a small picture of this height and width in tokens."""
        return 1, height * self.merge, width * self.merge


FamilyTokens = PatchTokens | TileTokens
"""How the pictures of a family become tokens."""


@dataclass(frozen=True, slots=True)
class PixelScale:
    """How a tower wants the colours of a pixel, red, green and blue: (byte * factor - mean) / deviation."""

    factor: float
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]


def pixel_scale(folder: str) -> PixelScale:
    """Reads how a model's tower wants pixels.

    Raises:
        ConfigError: a file is missing or lacks a value.
        OSError: a transient error.
    """
    file, processor = read_processor(Path(folder), "image_mean")
    mean, deviation = (_colours(processor, key, file) for key in ("image_mean", "image_std"))
    factor = processor.get("rescale_factor", 1 / 255)
    if not _is_positive(factor) or not all(map(_is_positive, deviation)):
        raise refused_model(f"{file}: rescale_factor and image_std need numbers above 0.")
    return PixelScale(float(factor), mean, deviation)


def _colours(processor: dict[str, Any], key: str, file: Path) -> tuple[float, float, float]:
    found = processor.get(key)
    if not isinstance(found, list) or len(found) != 3 or not all(map(_is_finite, found)):
        raise refused_model(f"{file}: {key} needs three numbers, red, green and blue.")
    return float(found[0]), float(found[1]), float(found[2])


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_finite(value) and value > 0


@lru_cache(maxsize=4)
def picture_tokens(folder: str, min_pixels: int = 0, max_pixels: int = 0) -> FamilyTokens:
    """Reads how the model in a folder writes pictures into prompts.

    Args:
        min_pixels, max_pixels: instead of the folder's; 0: as there.

    Raises:
        ConfigError: a file is missing or lacks a value, or the model's type is not supported.
        OSError: a transient error.
    """
    if (config := read_json_object(Path(folder) / CONFIG)) is None:
        raise refused_model(f"{folder} has no {CONFIG}; name a Hugging Face model folder.")
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or (kind := family.tower) is None:
        known = ", ".join(each.model_type for each in FAMILIES.values() if each.tower)
        raise refused_model(
            f"{folder}: pictures are taken by models of the types {known}, not {config.get('model_type')!r}."
        )
    if kind.has_tiles:
        return read_tiles(Path(folder), config, min_pixels, max_pixels)
    file, processor = read_processor(Path(folder))
    size = processor.get("size")
    sizes = size if isinstance(size, dict) else {}
    frames = whole_number(processor, "temporal_patch_size", file) if kind.counts_frames else 1
    least = min_pixels * frames or sizes.get("shortest_edge") or processor.get("min_pixels")
    most = max_pixels * frames or sizes.get("longest_edge") or processor.get("max_pixels")
    ids = {key: whole_number(config, key, Path(folder) / CONFIG, least=0) for key in kind.marks}
    refuse_beyond(Path(folder), config, ids)
    return PatchTokens(
        image_token_id=ids["image_token_id"],
        mark_ids=tuple(ids.values()),
        patch=whole_number(processor, "patch_size", file),
        merge=whole_number(processor, "merge_size", file),
        min_pixels=whole_number({"min_pixels": least}, "min_pixels", file),
        max_pixels=whole_number({"max_pixels": most}, "max_pixels", file),
        frames=frames,
    )


def unlimited_tokens(folder: str) -> FamilyTokens:
    """As `picture_tokens`, for whoever asks for no sizes: the folder need not say limits of pixels."""
    return picture_tokens(folder, 1, MOST_NUMBER >> 8)
