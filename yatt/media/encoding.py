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
    """Pictures as JPEG files of limited size: a `yatt.media.prepare.Preparation`.

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
        picture = _resized(picture, *self._size_of(*picture.size))
        while True:
            for quality in QUALITIES:
                data = _jpeg_of(picture, quality)
                if len(data) <= self.most_bytes:
                    return (1, 1, len(data)), np.frombuffer(data, np.uint8).reshape(-1, 1)
            if max(picture.size) < 2 * LEAST_SIDE:
                raise MediaRefused(f"does not fit into {self.most_bytes} bytes as a JPEG file")
            picture = _resized(picture, *(max(1, side // 2) for side in picture.size))

    def _size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height within the limits. Where one would be below a pixel, the other is shorter."""
        scale = min(1.0, math.sqrt(self.most_pixels / (width * height)), self.most_side / max(width, height))
        wide, high = (max(1, math.floor(side * scale)) for side in (width, height))
        wide = max(1, min(wide, self.most_pixels // high))
        return wide, max(1, min(high, self.most_pixels // wide))


def _resized(picture: Image.Image, width: int, height: int) -> Image.Image:
    if picture.size == (width, height):
        return picture
    return picture.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)


def _jpeg_of(picture: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality, subsampling=0)  # small coloured text stays legible
    return file.getvalue()
