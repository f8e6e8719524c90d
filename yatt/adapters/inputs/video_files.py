"""Files of videos: what they are by their first bytes, and lists of frames, which are files of their own.

A list of frames in a data row becomes a file in `data.media_store` that names its pictures by their digests,
so that it has one digest, too. Nothing is decoded here.
"""

import msgspec

from yatt.adapters.inputs.media_head import MediaRefused
from yatt.plain_files import encoding_fault

TAKEN_VIDEOS = "MP4, WebM or Matroska"
_LIST = b'{"yatt_frames":'
_MATROSKA, _BRAND = b"\x1a\x45\xdf\xa3", slice(4, 8)
_STILL = (b"avif", b"avis", b"heic", b"heix", b"mif1")
_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM")
_PAGES = (b"<!doctype html", b"<html", b"<head", b"<?xml")


class NamedFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A picture of a list of frames, as in `MediaRef`."""

    path: str
    sha256: str


class FrameList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The frames of a video, in order, and how many are a second. `yatt_frames` is the version of this
    form."""

    yatt_frames: int = 1
    fps: float
    frames: tuple[NamedFrame, ...]


def is_frame_list(content: bytes) -> bool:
    """Whether a file's content is a list of frames."""
    return content.startswith(_LIST)


def frame_list(content: bytes) -> FrameList:
    """Reads a list of frames.

    Raises:
        MediaRefused: it is damaged, or of another version.
    """
    try:
        found = msgspec.json.decode(content, type=FrameList)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MediaRefused("is a damaged list of frames") from error
    if found.yatt_frames != 1 or not found.frames:
        raise MediaRefused("is a list of frames in another form")
    return found


def refuse_other_files(first: bytes) -> None:
    """Refuses a file that is no video, by its first bytes; 16 are enough to take one.

    Raises:
        MediaRefused: says what it is instead.
    """
    if first.startswith(_MATROSKA) or (first[_BRAND] == b"ftyp" and first[8:12] not in _STILL):
        return
    if not first:
        raise MediaRefused("is empty; copy it again")
    if first.lstrip().lower().startswith(_PAGES):
        raise MediaRefused("is a page in HTML or XML, not a video: what it was copied from gave an error?")
    if fault := encoding_fault(first):
        raise MediaRefused(fault)
    if first.startswith(_PICTURES):
        raise MediaRefused("is a picture, not a video; a list of pictures is taken as frames")
    raise MediaRefused(f"is not a video in {TAKEN_VIDEOS}; convert it")
