"""Prepares pictures by the model's own processor: resizes them and cuts them into patches, as bytes.

The processor neither rescales nor normalises, so that its result are whole numbers, which bytes hold exactly;
engine and trainer normalise. Of a still picture the processor makes two equal frames, of which one is kept.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from yatt.adapters.inputs.media_head import MediaRefused
from yatt.errors import ConfigError, error_line
from yatt.models.pictures.tokens import unlimited_tokens
from yatt.printable import printable

RULES = 1
"""Number of the rules of decoding and of the form of the result; a change of either needs another one."""

_SIZES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
CURE = (
    "Copy the model's folder with its processor's files: preprocessor_config.json or processor_config.json."
)


@dataclass(frozen=True, slots=True, eq=False)
class Preparation:
    """A model's way to prepare pictures. Several threads may use it.

    Attributes:
        digest: of its settings, in hex: class of the processor, sizes, patches, resampling, normalisation.
    """

    processor: Any
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        settings = {"rules": RULES, "class": type(self.processor).__name__, **self.processor.to_dict()}
        text = json.dumps(settings, sort_keys=True, default=str)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())

    def patches_of(self, picture: Image.Image) -> tuple[tuple[int, int, int], NDArray[np.uint8]]:
        """Returns the grid, and patches in the processor's order: [rows, channels * patch * patch] uint8.

        Raises:
            MediaRefused: the processor refuses the picture, for example because it is too narrow.
        """
        try:
            made = self.processor(images=[picture], do_rescale=False, do_normalize=False, return_tensors="pt")
        except ValueError as error:
            raise MediaRefused(f"cannot be prepared ({printable(str(error))[:160]})") from None
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
        whole = np.ascontiguousarray(still).astype(np.uint8).reshape(len(values), -1)
        if not np.array_equal(whole, still.reshape(len(values), -1)):
            raise ValueError("the processor's pixels are not whole numbers from 0 to 255")
        return (time, height, width), whole


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
        frames = unlimited_tokens(str(folder)).frames
        given = {"min_pixels": min_pixels * frames, "max_pixels": max_pixels * frames}
        sizes = {edge: given[key] or processor.size[edge] for edge, key in _SIZES.items()}
        processor.size = {**dict(processor.size), **sizes}
        preparation = Preparation(processor)
        preparation.patches_of(Image.new("RGB", (64, 64)))
    except Exception as error:  # a library and the user's files: any type
        raise ConfigError(
            f"model.path: {folder} has no picture processor that can be used ({error_line(error)}). {CURE}"
        ) from error
    return preparation
