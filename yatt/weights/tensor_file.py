"""Reads safetensors files with plain reads, so that a filesystem error is raised as such.

The safetensors library maps files into memory: a page that cannot be read kills the process (SIGBUS), and a
file that cannot be opened is reported as missing.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from yatt.errors import ConfigError

CHUNK_BYTES = 64 << 20
"""Bytes between two ticks."""

MAX_HEADER_BYTES = 100_000_000
"""Same limit as in the safetensors library."""

LENGTH_BYTES = 8
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Source: the format's description, https://huggingface.co/docs/safetensors."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of one tensor; `begin` is relative to the start of the file."""

    dtype: str
    """Name in the file's header; an unknown dtype is an error only when the tensor is read."""

    shape: tuple[int, ...]
    begin: int
    size_bytes: int


class TensorFile:
    """One safetensors file, which is opened for each read.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is not a valid safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._places = self._read_header(file)

    def names(self) -> tuple[str, ...]:
        """Names of its tensors."""
        return tuple(self._places)

    def read(self, name: str, tick: Callable[[], None]) -> Tensor:
        """Reads one tensor to the CPU.

        Args:
            tick: called after each `CHUNK_BYTES`.

        Raises:
            OSError: it cannot be read.
            ConfigError: the file ends too early, or the tensor's dtype is unknown.
        """
        place = self._places[name]
        if (dtype := DTYPES.get(place.dtype)) is None:
            known = ", ".join(DTYPES)
            raise ConfigError(f"model.path: {self._path}: tensor {name} is {place.dtype}; known are {known}.")
        data = torch.empty(place.size_bytes, dtype=torch.uint8)
        view = data.numpy().data
        with self._path.open("rb", buffering=0) as file:
            file.seek(place.begin)
            at = 0
            while at < place.size_bytes:
                count = file.readinto(view[at : at + CHUNK_BYTES])
                if not count:
                    raise self._fault(f"ends within tensor {name}")
                at += count
                tick()
        return data.view(dtype).view(place.shape)

    def _read_header(self, file: BinaryIO) -> dict[str, _Place]:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise self._fault("has no header")
        body = file.read(length)
        if len(body) != length:
            raise self._fault("ends within its header")
        try:
            first, size_bytes = LENGTH_BYTES + length, os.fstat(file.fileno()).st_size
            return dict(_places(json.loads(body), first, size_bytes))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._fault(f"has a header that cannot be read ({error!r})") from error

    def _fault(self, what: str) -> ConfigError:
        return ConfigError(
            f"model.path: {self._path} {what}; it is no whole safetensors file. Copy it again."
        )


def _places(header: dict[str, Any], first: int, end_of_file: int) -> Iterator[tuple[str, _Place]]:
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


def _place(entry: dict[str, Any], first: int) -> _Place:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end - begin)):
        raise TypeError(f"{dtype!r}, {shape}, {begin}, {end}")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{end - begin} bytes for shape {shape} of {dtype}")
    return _Place(dtype, shape, first + begin, end - begin)
