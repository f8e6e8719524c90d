"""Reads the header of a safetensors file: names, dtypes, shapes and places of its tensors. No torch.

Plain reads, so that a filesystem error is raised as such: the safetensors library maps files into memory,
where a page that cannot be read kills the process (SIGBUS).
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from yatt.errors import ConfigError
from yatt.plain_files import open_regular

MAX_HEADER_BYTES = 100_000_000
"""Same limit as in the safetensors library."""

LENGTH_BYTES = 8
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by dtype. Source: the format's description, https://huggingface.co/docs/safetensors."""


OTHER_DTYPES = frozenset(
    {
        "F4",
        "F6_E2M3",
        "F6_E3M2",
        "F8_E8M0",
        "F8_E4M3FNUZ",
        "F8_E5M2FNUZ",
        "U16",
        "U32",
        "U64",
        "C64",
    }
)
"""Dtypes that the safetensors library (0.8) knows too; it refuses a file with any other."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of one tensor; `begin` is relative to the start of the file."""

    dtype: str
    """Name in the file's header; one that yatt does not read is an error only when the tensor is read."""

    shape: tuple[int, ...]
    begin: int
    size_bytes: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Reads the places of a file's tensors, by name.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is not a valid safetensors file.
    """
    with open_regular(path) as file:
        return _read(file, path)


def invalid_file(path: Path, what: str) -> ConfigError:
    """The error about a file that is not a whole safetensors file."""
    return ConfigError(f"{path} {what}; it is no whole safetensors file. Copy it again.")


def _read(file: BinaryIO, path: Path) -> dict[str, TensorPlace]:
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if not 0 < length <= MAX_HEADER_BYTES:
        raise invalid_file(path, "has no header")
    body = file.read(length)
    if len(body) != length:
        raise invalid_file(path, "ends within its header")
    try:
        first, size_bytes = LENGTH_BYTES + length, os.fstat(file.fileno()).st_size
        return dict(_places(json.loads(body), first, size_bytes))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise invalid_file(path, f"has a header that cannot be read ({error!r})") from error


def _places(header: dict[str, Any], first: int, end_of_file: int) -> Iterator[tuple[str, TensorPlace]]:
    """Places from a header. Raises ValueError, KeyError, TypeError or AttributeError if it is invalid."""
    found = [(name, _place(entry, first)) for name, entry in header.items() if name != "__metadata__"]
    at = first
    for name, place in sorted(found, key=lambda each: (each[1].begin, each[1].size_bytes)):
        if place.begin != at:
            raise ValueError(f"{name} begins at {place.begin}, not at {at}")
        at += place.size_bytes
    if at != end_of_file:
        raise ValueError(f"its tensors end at {at}, the file at {end_of_file}")
    yield from found


def _place(entry: dict[str, Any], first: int) -> TensorPlace:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end - begin)):
        raise TypeError(f"{dtype!r}, {shape}, {begin}, {end}")
    if dtype not in ITEM_BYTES and dtype not in OTHER_DTYPES:
        raise ValueError(f"{dtype!r} is no dtype")
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{end - begin} bytes for shape {shape} of {dtype}")
    return TensorPlace(dtype, shape, first + begin, end - begin)
