"""Pictures for tests, made by PIL and by hand."""

import functools
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

ORIENTATION = 0x0112


def pixels(width: int, height: int, seed: int = 0) -> np.ndarray:
    """A smooth coloured picture, [height, width, 3] uint8, so that JPEG changes it little."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, 3)).astype(np.float64)
    y, x = np.linspace(0, 1, height)[:, None, None], np.linspace(0, 1, width)[None, :, None]
    top = corners[0, 0] * (1 - x) + corners[0, 1] * x
    bottom = corners[1, 0] * (1 - x) + corners[1, 1] * x
    return (top * (1 - y) + bottom * y).astype(np.uint8)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(pixels(width, height, seed))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """The picture as a file of this format."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    """EXIF with this orientation."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_head(width: int, height: int, bits: int = 8, colour: int = 2) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head)


def bomb(width: int, height: int) -> bytes:
    """A black PNG: some hundred KiB for a picture of hundreds of MiB."""
    squeeze, row, packed = zlib.compressobj(1), bytes(width * 3 + 1), []
    for _ in range(height):
        packed.append(squeeze.compress(row))
    packed.append(squeeze.flush())
    data = b"".join(packed)
    return png_head(width, height) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def grey_16(values: np.ndarray) -> bytes:
    """A PNG of 16-bit grey, [height, width] uint16, by hand."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    data = png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    return png_head(values.shape[1], values.shape[0], 16, 0) + data


@functools.cache
def hostile_files() -> dict[str, bytes]:
    """Names and contents of files that are no pictures, or should not be decoded."""
    whole = encoded(picture(64, 48), "JPEG")
    png = encoded(picture(64, 48), "PNG")
    return {
        "bomb.png": bomb(9000, 9000), "larger-bomb.png": bomb(12000, 12000),
        "huge-head.png": png_head(2**31 - 1, 2**31 - 1), "cut.jpg": whole[: len(whole) // 2],
        "cut.png": png[: len(png) // 2], "head-only.png": png[:33], "empty.png": b"",
        "drawing.png": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>',
        "page.jpg": b"<!DOCTYPE html><html><body>404</body></html>", "text.png": b"hello" * 100,
        "zero-size.png": png_head(0, 7) + png_chunk(b"IEND", b""), "zeros.bmp": bytes(5000),
        "archive.gif": b"PK\x03\x04" + bytes(100), "pointer.png": b"version https://git-lfs.github.com/spec/v1\n",
        "tiff.jpg": b"II*\0" + bytes(60), "loud.gif": b"GIF89a" + b"\xff" * 300,
    }  # fmt: skip


def good_files() -> dict[str, tuple[bytes, tuple[int, int]]]:
    """Unusual pictures that are to be taken, with the size at which they are shown."""
    frames = [picture(40, 30, seed) for seed in range(3)]
    grey = np.full((20, 30), 40000, np.uint16)
    return {
        "png-in.jpg": (encoded(picture(64, 48), "PNG"), (64, 48)),
        "animated.gif": (encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), (40, 30)),
        "animated.webp": (encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]), (40, 30)),
        "print.jpg": (encoded(picture(64, 48).convert("CMYK"), "JPEG"), (64, 48)),
        "grey16.png": (grey_16(grey), (30, 20)),
        "turned.jpg": (encoded(picture(96, 48), "JPEG", exif=turned(6)), (48, 96)),
    }  # fmt: skip


Made = Callable[[int, int, int], bytes]
FORMATS: dict[str, Made] = {
    "PNG": lambda w, h, s: encoded(picture(w, h, s), "PNG"),
    "JPEG": lambda w, h, s: encoded(picture(w, h, s), "JPEG", progressive=bool(s % 2)),
    "WEBP": lambda w, h, s: encoded(picture(w, h, s), "WEBP", lossless=bool(s % 2)),
    "GIF": lambda w, h, s: encoded(picture(w, h, s), "GIF"),
    "BMP": lambda w, h, s: encoded(picture(w, h, s), "BMP"),
}


def write_geometry(path: Path, *, rows: int) -> Path:
    """A parquet file as verl's preprocessing of geo3k writes it: bytes in the file, marks in the text."""
    import pyarrow
    from pyarrow import parquet

    data = [
        {
            "data_source": "hiyouga/geometry3k", "ability": "math",
            "prompt": [{"role": "user", "content": f"<image>Find x{number}."}],
            "images": [{"bytes": encoded(noise(50 + 9 * number, 40), "PNG"), "path": None}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"split": "train", "index": number, "answer": str(number)},
        }
        for number in range(rows)
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(data), path, row_group_size=3)
    return path


def noise(width: int, height: int) -> Image.Image:
    return Image.effect_noise((width, height), 90).convert("RGB")
