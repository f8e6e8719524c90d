"""Reads tensors of safetensors files with plain reads, so that a filesystem error is raised as such."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from yatt.adapters.inputs.tensor_header import invalid_file, read_header
from yatt.errors import ConfigError

CHUNK_BYTES = 64 << 20
"""Bytes between two ticks."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the name in a file's header."""


class TensorFile:
    """One safetensors file, which is opened for each read.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is not a valid safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places = read_header(path)

    def names(self) -> tuple[str, ...]:
        """Names of its tensors."""
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of its tensors."""
        return self._places[name].shape

    def read(self, name: str, tick: Callable[[], None], block: int | None = None) -> Tensor:
        """Reads one tensor to the CPU.

        Args:
            tick: called after each `CHUNK_BYTES`.
            block: only this one of its first dimension; None: all of it.

        Raises:
            OSError: it cannot be read.
            ConfigError: the file ends too early, or the tensor's dtype is unknown.
        """
        place = self._places[name]
        if (dtype := DTYPES.get(place.dtype)) is None:
            known = ", ".join(DTYPES)
            raise ConfigError(f"model.path: {self._path}: tensor {name} is {place.dtype}; known are {known}.")
        shape, size_bytes = place.shape, place.size_bytes
        if block is not None:
            shape, size_bytes = shape[1:], size_bytes // shape[0]
        data = torch.empty(size_bytes, dtype=torch.uint8)
        view = data.numpy().data
        with self._path.open("rb", buffering=0) as file:
            file.seek(place.begin + (block or 0) * size_bytes)
            at = 0
            while at < size_bytes:
                count = file.readinto(view[at : at + CHUNK_BYTES])
                if not count:
                    raise invalid_file(self._path, f"ends within tensor {name}")
                at += count
                tick()
        return data.view(dtype).view(shape)
