"""Reads files that others wrote, such as a model's: only regular files, up to a size, as UTF-8 text.

A FIFO or device does not block the reader, and a huge file does not fill the memory.
"""

import errno
import json
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from yatt.errors import ConfigError

COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}
"""Formats by the first bytes of a file."""

UTF16 = (b"\xff\xfe", b"\xfe\xff")
BOM = b"\xef\xbb\xbf"
LFS = b"version https://git-lfs"
"""Begin of what git has instead of a large file that was not fetched."""

MAX_JSON_BYTES = 64 << 20
HALF_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a character that is written as two escapes."""

MAX_DEPTH = 100
"""Nesting of a model's JSON files; deeper ones exhaust the stack of programs that read them."""


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading, without blocking on a FIFO.

    Raises:
        OSError: it cannot be opened, or is not a regular file (IsADirectoryError for a folder).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, "is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, most_bytes: int = MAX_JSON_BYTES) -> bytes | None:
    """Returns the content of a regular file; None if there is no file of this name.

    Raises:
        ConfigError: it is no regular file, too large, or cannot be read; its cause is the filesystem's error.
    """
    try:
        with open_regular(path) as file:
            data = file.read(most_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Copy it again.") from error
    if len(data) > most_bytes:
        raise ConfigError(f"{path} has more than {most_bytes >> 20} MiB, too many for such a file.")
    return data


def encoding_fault(data: bytes) -> str:
    """What a file that begins with these bytes is instead of text in UTF-8, with the cure; empty: unknown."""
    kind = next((name for magic, name in COMPRESSED.items() if data.startswith(magic)), "")
    if kind:
        return f"is compressed ({kind}); decompress it"
    if data.startswith(UTF16):
        return "is text in UTF-16; save it as UTF-8"
    if data.startswith(LFS):
        return "is a pointer of git-lfs, not the file; run `git lfs pull`"
    return ""


def text_of(path: Path, data: bytes) -> str:
    """Returns the content of a text file.

    Raises:
        ConfigError: it is not UTF-8, has a byte order mark, or is compressed.
    """
    if fault := encoding_fault(data):
        raise ConfigError(f"{path} {fault}.")
    if data.startswith(BOM):
        raise ConfigError(f"{path} begins with a byte order mark; save it as UTF-8 without one.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        kind = "JSON" if path.suffix == ".json" else "text"
        raise ConfigError(f"{path} is not {kind} in UTF-8 ({error.reason}); save it as UTF-8.") from error


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file; None if there is no file of this name.

    Raises:
        ConfigError: as in `read_plain` and `text_of`, or it is not one JSON object.
    """
    if (data := read_plain(path)) is None:
        return None
    text = text_of(path, data)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}. Copy it again.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object; save the model with save_pretrained.")
    if is_deeper(found, MAX_DEPTH):
        raise ConfigError(f"{path} is nested too deeply, more than {MAX_DEPTH} levels.")
    if HALF_ESCAPE.search(data) and (half := _half_character(found)):
        raise ConfigError(
            f"{path} has half a character (a lone surrogate, {half}), which is not text; delete it."
        )
    return found


def _half_character(value: object) -> str:
    """The first lone surrogate in the texts of a JSON value; empty if there is none."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return ""


def is_deeper(value: object, levels: int) -> bool:
    """Whether lists and objects of a JSON value are nested in more than so many levels."""
    layer = [value]
    for _ in range(levels):
        layer = [
            child
            for each in layer
            if isinstance(each, list | dict)
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, list | dict)
        ]
        if not layer:
            return False
    return True
