"""Prepares pictures by the model's own processor: resizes them and cuts them into patches, as bytes.

The processor neither rescales nor normalises, so that its result are whole numbers, which bytes hold exactly;
engine and trainer normalise. Of a still picture the processor makes two equal frames, of which one is kept.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from yatt.adapters.inputs.media_head import MediaRefused
from yatt.errors import ConfigError, error_line
from yatt.models.pictures.tiles import TileTokens
from yatt.models.pictures.tokens import picture_tokens, unlimited_tokens
from yatt.printable import printable
from yatt.records.media import Grid

RULES = 1
"""Number of the rules of decoding and of the form of the result; a change of either needs another one."""

_SIZES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
CURE = (
    "Copy the model's folder with its processor's files: preprocessor_config.json or processor_config.json."
)


class Preparation(Protocol):
    """What a picture is made into: patches for a model, or a file (`yatt.media.encoding.PictureEncoding`).

    Several threads may use it.
    """

    @property
    def digest(self) -> str:
        """Of its settings, in hex: class of the processor, sizes, patches, resampling, normalisation."""

    def patches_of(self, picture: Image.Image) -> tuple[Grid, NDArray[np.uint8]]:
        """Returns the grid, and patches in the processor's order: [rows, channels * patch * patch] uint8.

        Raises:
            MediaRefused: the processor refuses the picture, for example because it is too narrow.
        """


@dataclass(frozen=True, slots=True, eq=False)
class PatchPreparation:
    """Prepares pictures that keep their ratio; see `yatt.models.pictures.tokens.PatchTokens`."""

    processor: Any
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest_of(self.processor, {}))

    def patches_of(self, picture: Image.Image) -> tuple[Grid, NDArray[np.uint8]]:
        """See `Preparation`."""
        made = _made_by(self.processor, picture)
        ((time, height, width),) = made["image_grid_thw"].tolist()
        values = made["pixel_values"].numpy()
        frames = self.processor.temporal_patch_size
        side = self.processor.patch_size**2
        if time != 1 or values.shape[0] != height * width or values.shape[1] % (frames * side):
            raise ValueError("the processor's result has another form than patches of one picture")
        patches = values.reshape(len(values), -1, frames, side)
        still = patches[:, :, 0]
        if not all(np.array_equal(still, patches[:, :, frame]) for frame in range(1, frames)):
            raise ValueError("the processor's frames of a still picture differ")
        return (time, height, width), _as_bytes(still.reshape(len(values), -1))


@dataclass(frozen=True, slots=True, eq=False)
class TilePreparation:
    """Cuts pictures into tiles. Patches are those of a tile, row by row, one tile after the other."""

    processor: Any
    tokens: TileTokens
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest_of(self.processor, self._sizes))

    def patches_of(self, picture: Image.Image) -> tuple[Grid, NDArray[np.uint8]]:
        """See `Preparation`."""
        grid, patch = self.tokens.grid_of(*picture.size), self.tokens.patch
        (tiles, height, width), side = grid, self.tokens.tile
        values = _made_by(self.processor, picture, **self._sizes)["pixel_values"].numpy()
        if values.shape != (tiles, 3, side, side):
            raise ValueError(f"the processor makes {values.shape} of a picture with {tiles} tiles of {side}")
        patches = values.reshape(tiles, 3, height, patch, width, patch).transpose(0, 2, 4, 1, 3, 5)
        return grid, _as_bytes(patches.reshape(tiles * height * width, -1))

    @property
    def _sizes(self) -> dict[str, Any]:
        limits = {"min_patches": self.tokens.min_tiles, "max_patches": self.tokens.max_tiles}
        return {"crop_to_patches": True, **limits}


def _digest_of(processor: Any, more: dict[str, Any]) -> str:
    settings = {"rules": RULES, "class": type(processor).__name__, **processor.to_dict(), **more}
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _made_by(processor: Any, picture: Image.Image, **more: Any) -> Any:
    plain = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
    try:
        return processor(images=[picture], **plain, **more)
    except ValueError as error:
        raise MediaRefused(f"cannot be prepared ({printable(str(error))[:160]})") from None


def _as_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    whole = np.ascontiguousarray(pixels).astype(np.uint8)
    if not np.array_equal(whole, pixels):
        raise ValueError("the processor's pixels are not whole numbers from 0 to 255")
    return whole


def load_preparation(folder: Path, min_pixels: int = 0, max_pixels: int = 0) -> Preparation:
    """Loads the processor of a model folder, and tries it.

    Args:
        min_pixels, max_pixels: instead of the folder's; 0: as there.

    Raises:
        ConfigError: the folder has none, or one whose result is not that of the supported families.
    """
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        preparation = _preparation(processor, folder, min_pixels, max_pixels)
        preparation.patches_of(Image.new("RGB", (64, 64)))
    except Exception as error:  # a library and the user's files: any type
        raise ConfigError(
            f"model.path: {folder} has no picture processor that can be used ({error_line(error)}). {CURE}"
        ) from error
    return preparation


def _preparation(processor: Any, folder: Path, min_pixels: int, max_pixels: int) -> Preparation:
    tokens = unlimited_tokens(str(folder))
    if isinstance(tokens, TileTokens):
        limited = picture_tokens(str(folder), min_pixels, max_pixels)
        assert isinstance(limited, TileTokens), "of the same folder"
        return TilePreparation(processor, limited)
    given = {"min_pixels": min_pixels * tokens.frames, "max_pixels": max_pixels * tokens.frames}
    sizes = {edge: given[key] or processor.size[edge] for edge, key in _SIZES.items()}
    processor.size = {**dict(processor.size), **sizes}
    return PatchPreparation(processor)
