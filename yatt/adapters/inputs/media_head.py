"""The head of a picture: its type and size, read without an image library.

Formats: PNG, JPEG, WebP, GIF and BMP, told apart by their first bytes, never by their names. The first 4 KiB
are enough for most files; segments before the size are skipped by their lengths. The work is bounded: at most
`MOST_PARTS` segments are looked at, and 64 KiB of each.

Sources: PNG specification, third edition, section 11.3.4.2 (eXIf); ITU T.81, annex B (JPEG); RFC 9649 (WebP);
GIF89a specification, section 18; Exif 2.32, section 4.6.2 (tag 0x0112).
"""

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.plain_files import encoding_fault, open_regular

HEAD_BYTES = 4096
MOST_PARTS = 512
MOST_PART_BYTES = 1 << 16
EXIF = b"Exif\0\0"
ORIENTATION = 0x0112
SIDEWAYS = frozenset({5, 6, 7, 8})
"""EXIF orientations that exchange width and height."""

TAKEN = "PNG, JPEG, WebP, GIF or BMP"

At = Callable[[int, int], bytes]
"""Returns so many bytes from an offset on; fewer at the end of the file."""


class MediaRefused(ValueError):
    """A file is not a picture that can be used. The text continues a sentence that begins with its name."""


@dataclass(frozen=True, slots=True)
class MediaHead:
    """Type and size of a picture.

    Attributes:
        kind: PNG, JPEG, WEBP, GIF or BMP.
        width, height: pixels, as stored.
        orientation: of EXIF, 1 to 8; 1 if the file has none before its pixels (WebP: at all).
    """

    kind: str
    width: int
    height: int
    orientation: int = 1

    @property
    def shown_size(self) -> tuple[int, int]:
        """Width and height of the picture as it is shown, that is, turned by its orientation."""
        is_sideways = self.orientation in SIDEWAYS
        return (self.height, self.width) if is_sideways else (self.width, self.height)

    @property
    def num_pixels(self) -> int:
        """Number of pixels."""
        return self.width * self.height


def head_of_bytes(data: bytes) -> MediaHead:
    """Reads the head of a file's content.

    Raises:
        MediaRefused: it is no picture of these formats.
    """
    return head_by_parts(lambda offset, size: data[offset : offset + size])


def head_of_file(path: Path) -> MediaHead:
    """Reads the head of a file, by 4 KiB and, where that is not enough, by its segments.

    Raises:
        MediaRefused: it is no picture of these formats.
        OSError: it cannot be read, or is no regular file.
    """
    with open_regular(path) as file:
        return head_by_parts(lambda offset, size: os.pread(file.fileno(), size, offset))


def head_by_parts(read_at: At) -> MediaHead:
    """Reads the head of anything that can be read by offset and size; the first 4 KiB are read once.

    Raises:
        MediaRefused: it is no picture of these formats.
        Exception: whatever `read_at` raises.
    """
    first = read_at(0, HEAD_BYTES)

    def at(offset: int, size: int) -> bytes:
        is_there = offset + size <= len(first) or len(first) < HEAD_BYTES
        return first[offset : offset + size] if is_there else read_at(offset, size)

    for magic, read in _READERS.items():
        if first.startswith(magic):
            head = read(at)
            if not head.width or not head.height:
                raise MediaRefused(f"has no pixels ({head.width} x {head.height})")
            return head
    raise MediaRefused(_name_fault(first))


def refuse_pixels(head: MediaHead, most_pixels: int) -> None:
    """Refuses a picture that is too large to be decoded.

    Raises:
        MediaRefused: it has more pixels than `most_pixels`.
    """
    if head.num_pixels > most_pixels:
        raise MediaRefused(
            f"has {head.width} x {head.height} pixels, more than media.most_pixels ({most_pixels}); "
            "make it smaller, or raise the limit"
        )


def _unpacked(form: str, at: At, offset: int) -> tuple[Any, ...]:
    data = at(offset, struct.calcsize(form))
    try:
        return struct.unpack(form, data)
    except struct.error:
        raise MediaRefused("is truncated: it ends in its head") from None


# ---- formats ------------------------------------------------------------------------------------


def _png(at: At) -> MediaHead:
    length, name, width, height = _unpacked(">I4sII", at, 8)
    if (length, name) != (13, b"IHDR") or max(width, height) >= 1 << 31:
        raise MediaRefused("is damaged: its first chunk is not the head of a PNG")
    for kind, offset, size in _chunks(at, 8, ">I4s", 4):
        if kind == b"IDAT":
            break
        if kind == b"eXIf":
            orientation = _orientation(at(offset, min(size, MOST_PART_BYTES)))
            return MediaHead("PNG", width, height, orientation)
    return MediaHead("PNG", width, height)


def _chunks(at: At, offset: int, form: str, tail: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields name, offset and size of the content of each chunk; `tail` bytes follow each content."""
    for _ in range(MOST_PARTS):
        data = at(offset, 8)
        if len(data) < 8:
            return
        found = struct.unpack(form, data)
        size, name = found if isinstance(found[0], int) else found[::-1]
        yield name, offset + 8, size
        offset += 8 + size + tail + (size % 2 if not tail else 0)


def _jpeg(at: At) -> MediaHead:
    offset, orientation = 2, 0
    for _ in range(MOST_PARTS):
        mark, kind = _unpacked(">BB", at, offset)
        if mark != 0xFF or kind in (0x00, 0xD9, 0xDA):
            raise MediaRefused("is damaged: its pixels begin before its size was said")
        if kind == 0xFF:  # a byte that only fills
            offset += 1
            continue
        if kind == 0x01 or 0xD0 <= kind <= 0xD8:  # without content
            offset += 2
            continue
        (size,) = _unpacked(">H", at, offset + 2)
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            bits, height, width = _unpacked(">BHH", at, offset + 4)
            if bits != 8:
                raise MediaRefused(f"has {bits} bits a colour, and JPEG is taken with 8; convert it")
            return MediaHead("JPEG", width, height, orientation or 1)
        if kind == 0xE1 and not orientation and at(offset + 4, len(EXIF)) == EXIF:
            orientation = _orientation(at(offset + 4, max(size - 2, 0)))
        offset += 2 + max(size, 2)
    raise MediaRefused(f"is damaged: its size is not among its first {MOST_PARTS} segments")


def _webp(at: At) -> MediaHead:
    form, kind = _unpacked("<4s4s", at, 8)
    if form != b"WEBP":
        raise MediaRefused(f"is a RIFF file, but no WebP picture; give it as {TAKEN}")
    if kind == b"VP8 ":
        code, width, height = _unpacked("<3sHH", at, 23)
        if code != b"\x9d\x01\x2a":
            raise MediaRefused("is damaged: its frame has no start code")
        return MediaHead("WEBP", width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        mark, bits = _unpacked("<BI", at, 20)
        if mark != 0x2F:
            raise MediaRefused("is damaged: its frame has no signature")
        return MediaHead("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        flags, low_w, high_w, low_h, high_h = _unpacked("<B3xHBHB", at, 20)
        orientation = _webp_orientation(at) if flags & 0x08 else 1
        return MediaHead("WEBP", (high_w << 16 | low_w) + 1, (high_h << 16 | low_h) + 1, orientation)
    raise MediaRefused("is damaged: its first chunk is none of WebP")


def _webp_orientation(at: At) -> int:
    for kind, offset, size in _chunks(at, 12, "<4sI", 0):
        if kind == b"EXIF":
            return _orientation(at(offset, min(size, MOST_PART_BYTES)))
    return 1


def _gif(at: At) -> MediaHead:
    width, height = _unpacked("<HH", at, 6)
    return MediaHead("GIF", width, height)


def _bmp(at: At) -> MediaHead:
    (size,) = _unpacked("<I", at, 14)
    if size == 12:
        width, height = _unpacked("<HH", at, 18)
    elif size in (40, 52, 56, 64, 108, 124):
        width, height = _unpacked("<Ii", at, 18)
    else:
        raise MediaRefused("is damaged: its head has a length that BMP does not know")
    return MediaHead("BMP", width, abs(height))


_READERS: dict[bytes, Callable[[At], MediaHead]] = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"\xff\xd8\xff": _jpeg,
    b"RIFF": _webp,
    b"GIF87a": _gif,
    b"GIF89a": _gif,
    b"BM": _bmp,
}


def _orientation(data: bytes) -> int:
    """Returns the orientation in a block of EXIF; 1 if it has none, or is damaged."""
    data = data.removeprefix(EXIF)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[:4])
    if order is None or len(data) < 8:
        return 1
    (offset,) = struct.unpack_from(order + "I", data, 4)
    if offset + 2 > len(data):
        return 1
    (count,) = struct.unpack_from(order + "H", data, offset)
    for place in range(offset + 2, min(offset + 2 + 12 * count, len(data) - 11), 12):
        tag, kind, number = struct.unpack_from(order + "HHI", data, place)
        if tag == ORIENTATION:
            form = {3: "H", 4: "I"}.get(kind)
            value = struct.unpack_from(order + form, data, place + 8)[0] if form and number == 1 else 1
            return value if 1 <= value <= 8 else 1
    return 1


# ---- other files --------------------------------------------------------------------------------

_OTHERS: dict[bytes, str] = {
    b"II*\0": "a TIFF picture",
    b"MM\0*": "a TIFF picture",
    b"8BPS": "a Photoshop picture",
    b"%PDF": "a PDF document",
    b"\x00\x00\x01\x00": "an icon",
    b"\xff\x0a": "a JPEG XL picture",
    b"\x00\x00\x00\x0cJXL ": "a JPEG XL picture",
    b"\x00\x00\x00\x0cjP  ": "a JPEG 2000 picture",
    b"\x1a\x45\xdf\xa3": "a video",
    b"SIMPLE  =": "a FITS picture",
}
_BRANDS = {
    b"avif": "an AVIF picture",
    b"avis": "an AVIF picture",
    b"heic": "a HEIC picture",
    b"heix": "a HEIC picture",
    b"mif1": "a HEIC picture",
}


def _name_fault(first: bytes) -> str:
    """Returns what a file that begins so is instead of a picture, with the cure."""
    if not first:
        return "is empty; copy it again"
    text = first.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<svg", b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in text:
        return f"is a drawing in SVG, which is a program and not taken; convert it to {TAKEN}"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return "is a page in HTML or XML, not a picture: what it was copied from gave an error?"
    if fault := encoding_fault(first):
        return fault
    name = next((name for magic, name in _OTHERS.items() if first.startswith(magic)), "")
    if first[4:8] == b"ftyp":
        name = _BRANDS.get(first[8:12], "a video")
    return f"is {name}; convert it to {TAKEN}" if name else f"is not a picture in {TAKEN}"
