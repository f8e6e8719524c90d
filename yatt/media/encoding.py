"""Encodes pictures for who takes whole files: a judge behind a URL, a page for people.

The file is written anew from the decoded pixels, so nothing of the stranger's file is passed on: no metadata,
and no bytes that another decoder would take for something else.
"""

import hashlib
import io
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from yatt.adapters.inputs.media_head import MediaRefused

RULES = 1
"""Number of the rules below; a change of them needs another one."""

MOST_SIDE = 8000
"""Longest side; services refuse longer ones, and JPEG ends at 65,535."""

LEAST_SIDE = 16
"""Longest side below which a picture is not made smaller, because it would show nothing."""

QUALITIES = (90, 75, 60, 45)


@dataclass(frozen=True, slots=True)
class PictureEncoding:
    """Pictures as JPEG files of limited size, in place of `yatt.media.prepare.Preparation`.

    Attributes:
        most_pixels, most_bytes, most_side: limits of each file.
        digest: of these, in hex.
    """

    most_pixels: int
    most_bytes: int
    most_side: int = MOST_SIDE
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        settings = f"JPEG {RULES} {self.most_pixels} {self.most_bytes} {self.most_side}"
        object.__setattr__(self, "digest", hashlib.sha256(settings.encode()).hexdigest())

    def patches_of(self, picture: Image.Image) -> tuple[tuple[int, int, int], NDArray[np.uint8]]:
        """Returns the file as if each byte were a patch: the grid (1, 1, bytes), and [bytes, 1] uint8.

        Raises:
            MediaRefused: it does not fit, however small.
        """
        picture = _resized(picture, self._scale_of(*picture.size))
        while True:
            for quality in QUALITIES:
                data = _jpeg_of(picture, quality)
                if len(data) <= self.most_bytes:
                    return (1, 1, len(data)), np.frombuffer(data, np.uint8).reshape(-1, 1)
            if max(picture.size) < 2 * LEAST_SIDE:
                raise MediaRefused(f"does not fit into {self.most_bytes} bytes as a JPEG file")
            picture = _resized(picture, 0.5)

    def _scale_of(self, width: int, height: int) -> float:
        return min(1.0, math.sqrt(self.most_pixels / (width * height)), self.most_side / max(width, height))


def _resized(picture: Image.Image, scale: float) -> Image.Image:
    if scale == 1.0:
        return picture
    width, height = (max(1, math.floor(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)


def _jpeg_of(picture: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality, subsampling=0)  # small coloured text stays legible
    return file.getvalue()
