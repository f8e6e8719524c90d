"""Decodes pictures of strangers. The rules are here only, so that every reader sees the same pixels.

- Type, size and orientation are those of `yatt.adapters.inputs.media_head`, which has read them before
  anything is decoded; a library that finds others is not believed.
- The picture is turned by its EXIF orientation; transparent pixels are blended over white.
- 16 bits a channel become 8 by their high byte; palettes, grey and CMYK become RGB.
- Of an animation the first frame is taken. A truncated file is refused.
"""

import io

import numpy as np
from PIL import Image

from yatt.adapters.inputs.media_head import MediaHead, MediaRefused, head_of_bytes, refuse_pixels
from yatt.printable import printable

Image.MAX_IMAGE_PIXELS = None  # `media.most_pixels` is checked by the head, before PIL sees the file
MOST_WORDS = 160
"""Longest text of the image library in a message."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How a picture is turned, by its EXIF orientation. Source: Exif 2.32, section 4.6.2."""


def decode_picture(data: bytes, most_pixels: int) -> Image.Image:
    """Decodes a file's content to an RGB picture, turned as it is to be shown.

    Raises:
        MediaRefused: it is no picture, has more than `most_pixels` pixels, is damaged, or needs too much
            memory.
    """
    head = head_of_bytes(data)
    refuse_pixels(head, most_pixels)
    try:
        picture = _decoded(data, head)
    except MediaRefused:
        raise
    except MemoryError:
        raise MediaRefused(f"needs more memory than a picture may ({head.width} x {head.height})") from None
    except Exception as error:  # noqa: BLE001 (the library raises any of twenty types for damaged files)
        says = printable(str(error))[:MOST_WORDS]
        raise MediaRefused(f"is damaged or truncated, and cannot be decoded ({says})") from None
    turn = _TURNS.get(head.orientation)
    return picture if turn is None else picture.transpose(turn)


def _decoded(data: bytes, head: MediaHead) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=[head.kind]) as picture:
        if picture.size != (head.width, head.height):
            raise MediaRefused(
                f"says {head.width} x {head.height} pixels, but its frame has {picture.width} x "
                f"{picture.height}"
            )
        picture.load()
        return _rgb(picture)


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):
        return _from_16_bits(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGB", picture.size, "white")
        white.paste(picture, mask=picture.getchannel("A"))
        return white
    return picture.convert("RGB")


def _from_16_bits(picture: Image.Image) -> Image.Image:
    """Grey of 16 bits; `convert` would cut it off at 255."""
    values = np.asarray(picture).astype(np.uint16)
    grey = (values >> 8).astype(np.uint8)
    clear = picture.info.get("transparency")
    if isinstance(clear, int):
        grey[values == clear] = 255
    return Image.fromarray(grey).convert("RGB")
