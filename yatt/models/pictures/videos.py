"""How a model writes videos into prompts, from its folder: sampled frames, pairs of them, times and tokens.

A video is a sequence of pairs of frames. Each has its time as text and then its tokens, as a picture has, so
that everything which takes pictures takes it: towers attend within a pair, and positions begin anew.

Source: transformers' `Qwen3VLProcessor` and `Qwen3VLVideoProcessor`; a test compares frames, grids and ids.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from yatt.errors import ConfigError
from yatt.models.config_types import refused_model
from yatt.models.families import FAMILIES
from yatt.models.folder import CONFIG
from yatt.models.pictures.processor_files import MOST_NUMBER, PROCESSOR_FILES
from yatt.models.pictures.tokens import MOST_RATIO, PatchTokens, pixel_scale, unlimited_tokens
from yatt.models.towers.tower import QWEN3
from yatt.plain_files import read_json_object
from yatt.records.episode import MediaRef

VIDEO_FILE = "video_preprocessor_config.json"
PAIR = 2
"""Frames that make one patch in time."""

MOST_FRAMES = 1 << 17
"""Longest video, in frames."""

MOST_FPS = 1000.0
_SIZES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoTokens:
    """How videos that keep their ratio become tokens.

    Attributes:
        mark_ids: what a chat template writes for a video: tokens before, of and after it. The middle one
            gives way to the pairs; each pair has tokens before and after it, too.
        fps: frames that are taken of a second of the video.
        min_frames, max_frames: limits of their number; there are never more than the video has.
        min_pixels, max_pixels: limits of all resized frames together.
        patch, merge: as in `PatchTokens`.
    """

    mark_ids: tuple[int, int, int]
    fps: float
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int
    patch: int
    merge: int

    @property
    def video_token_id(self) -> int:
        """The token of a video, and of each of its features."""
        return self.mark_ids[1]

    def sampled_frames(self, num_frames: int, fps: float) -> list[int]:
        """Returns the numbers of the frames that are taken, in order, of a video with so many frames.

        A video that has exactly `fps` frames a second loses none to rounding.
        """
        wanted = num_frames if fps == self.fps else int(num_frames / fps * self.fps)
        count = min(max(wanted, self.min_frames), self.max_frames, num_frames)
        if count == 1:
            return [0]
        step = (num_frames - 1) / (count - 1)  # as numpy's linspace computes it
        return [*(round(index * step) for index in range(count - 1)), num_frames - 1]

    def grid_of_video(self, width: int, height: int, num_sampled: int) -> tuple[int, int, int]:
        """Returns the number of pairs of frames, and of patches in height and width of each.

        Raises:
            ValueError: it has less than two frames, or one side is more than `MOST_RATIO` times the other.
        """
        if num_sampled < PAIR:
            raise ValueError(f"a video with {num_sampled} frame: it needs two; give it as a picture")
        unit = self.patch * self.merge
        size = height, width
        if min(size) < unit:
            scale = max(unit / height, unit / width)
            size = int(height * scale), int(width * scale)
        if max(size) / min(size) > MOST_RATIO:
            raise ValueError(
                f"{width} x {height} pixels: no side may be more than {MOST_RATIO} times the other"
            )
        sides = [round(side / unit) * unit for side in size]
        pixels, area = round(num_sampled / PAIR) * PAIR * math.prod(sides), num_sampled * math.prod(size)
        if pixels > self.max_pixels:
            factor = math.sqrt(area / self.max_pixels)
            sides = [max(unit, math.floor(side / factor / unit) * unit) for side in size]
        elif pixels < self.min_pixels:
            factor = math.sqrt(self.min_pixels / area)
            sides = [math.ceil(side * factor / unit) * unit for side in size]
        return -(-num_sampled // PAIR), sides[0] // self.patch, sides[1] // self.patch

    def grid_of_ref(self, ref: MediaRef) -> tuple[int, int, int]:
        """Returns the grid of a video, errors as in `grid_of_video`."""
        return self.grid_of_video(ref.width, ref.height, len(self.sampled_frames(ref.num_frames, ref.fps)))

    def pair_ids(self, ref: MediaRef, encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
        """Returns the ids of each pair of a video's frames: its time, and one token for each of its features.

        Args:
            encode: ids of text without special tokens.

        Raises:
            ValueError: as in `grid_of_video`.
        """
        _, height, width = self.grid_of_ref(ref)
        begin, video, end = self.mark_ids
        tokens = [begin, *[video] * (height * width // self.merge**2), end]
        frames = self.sampled_frames(ref.num_frames, ref.fps)
        return [[*encode(f"<{seconds:.1f} seconds>"), *tokens] for seconds in pair_seconds(frames, ref.fps)]


def pair_seconds(frames: Sequence[int], fps: float) -> list[float]:
    """Returns the time of each pair of frames in the video: the mean of both. A last single frame is a pair
    with itself."""
    whole = [*frames, frames[-1]] if len(frames) % PAIR else frames
    return [(first / fps + second / fps) / 2 for first, second in [*pairwise(whole)][::PAIR]]


@lru_cache(maxsize=4)
def video_tokens(
    folder: str, fps: float, max_frames: int, min_pixels: int = 0, max_pixels: int = 0
) -> VideoTokens:
    """Reads how the model in a folder writes videos into prompts.

    Args:
        fps, max_frames, min_pixels, max_pixels: `media.video`; 0 pixels: as in the folder.

    Raises:
        ConfigError: a file is missing or lacks a value, or the model's type takes no videos here.
        OSError: a transient error.
    """
    config = read_json_object(Path(folder) / CONFIG) or {}
    kind = config.get("model_type")
    if (family := FAMILIES.get(str(kind))) is None or family.tower is not QWEN3:
        known = ", ".join(each.model_type for each in FAMILIES.values() if each.tower is QWEN3)
        raise refused_model(f"{folder}: videos are taken by models of the types {known}, not {kind!r}.")
    pictures = unlimited_tokens(folder)
    assert isinstance(pictures, PatchTokens), "a family without tiles"
    begin, _, end = pictures.mark_ids
    token = config.get("video_token_id")
    if type(token) is not int or not 0 <= token < MOST_NUMBER or token == pictures.image_token_id:
        raise ConfigError(f"{Path(folder) / CONFIG}: video_token_id is {token!r}; it needs a token's number.")
    file, settings = _video_processor(Path(folder))
    _refuse_other_settings(folder, file, settings, pictures.patch, pictures.merge)
    size = settings.get("size")
    sizes = size if isinstance(size, dict) else {}
    given = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    limits = dict[str, int]()
    for key, value in given.items():
        found = value or sizes.get(_SIZES[key])
        if type(found) is not int or not 1 <= found < MOST_NUMBER:
            raise ConfigError(
                f"media.video.{key}: {file} does not say it (size.{_SIZES[key]}); copy the model's folder "
                f"with {VIDEO_FILE}, or write the number."
            )
        limits[key] = found
    least = settings.get("min_frames", 4)
    if type(least) is not int or not 1 <= least <= MOST_FRAMES:
        raise ConfigError(f"{file}: min_frames is {least!r}; it needs a whole number of 1 or more.")
    return VideoTokens(
        mark_ids=(begin, token, end),
        fps=fps,
        min_frames=least,
        max_frames=max_frames,
        min_pixels=limits["min_pixels"],
        max_pixels=limits["max_pixels"],
        patch=pictures.patch,
        merge=pictures.merge,
    )


def _video_processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the settings of videos and their file; none if the folder has no such file."""
    for name in (VIDEO_FILE, *PROCESSOR_FILES[1:]):
        found = read_json_object(folder / name)
        settings = found.get("video_processor", found if name == VIDEO_FILE else None) if found else None
        if isinstance(settings, dict):
            return folder / name, settings
    return folder / VIDEO_FILE, {}


def _refuse_other_settings(folder: str, file: Path, settings: dict[str, Any], patch: int, merge: int) -> None:
    """Refuses settings of videos by which frames would not be prepared as pictures are, or as here.

    Raises:
        ConfigError: there is one.
    """
    if not settings:
        return
    scale = pixel_scale(folder)
    wanted: dict[str, Any] = {
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": PAIR,
        "resample": 3,
        "image_mean": list(scale.mean),
        "image_std": list(scale.deviation),
        "rescale_factor": scale.factor,
        "cap_pixels_per_frame": False,
    }
    for key, value in wanted.items():
        found = settings.get(key)
        if found is not None and found != value:
            raise ConfigError(
                f"{file}: {key} is {found!r}; videos are taken with {value!r} only, as the model's pictures."
            )
