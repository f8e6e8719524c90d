"""Makes a checkpoint of a Hugging Face folder's weights, for `run.from_checkpoint` with `take: weights`.

It has main copies in float32 and the model's own parameters in bfloat16, so that a run of either dtype can
start from it; it has no optimizer state, so `take: state` is refused when it is restored. Tensors are read,
converted and written in bands of rows; no torch, no whole tensor in memory.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from yatt.adapters.files.patience import with_retries
from yatt.adapters.inputs.tensor_header import ITEM_BYTES, TensorPlace, invalid_file, read_header
from yatt.checkpoint.commit.holders import holder_of
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.commit.ownership import claim_store
from yatt.checkpoint.commit.pieces import FILE_BYTES, ITEM_BYTES as PIECE_ITEM_BYTES, in_files
from yatt.checkpoint.commit.writing import write_file
from yatt.checkpoint.store.store import Store
from yatt.checkpoint.store.streams import CHUNK_BYTES, Tick, in_threads
from yatt.core.attempts.checkpoint_names import MANIFESTS, shard_path
from yatt.errors import ConfigError
from yatt.models.folder import ModelFolder
from yatt.models.quantized import without_scales
from yatt.models.rows import WeightRow
from yatt.models.spans import RowSpan, file_spans, spans_within
from yatt.models.tensors import file_shapes, tensor_faults
from yatt.records.message import PlannedPiece, ShardFile

if TYPE_CHECKING:
    import numpy as np

DTYPES = ("F32", "BF16", "F16")
ITERATION, ATTEMPT = 1, 1
"""A manifest needs both; `from_checkpoint.take: weights` starts at iteration 0 whatever they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Band:
    """Rows [begin, end) of a parameter."""

    row: WeightRow
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.end - self.begin, *self.row.full_shape[1:])


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the folder: its file and its place there."""

    file: Path
    place: TensorPlace


def check_new_store(store: Store, url: str) -> None:
    """Refuses a store that is in use.

    Raises:
        ConfigError: it has checkpoints, or a run folder uses it.
    """
    if store.names(MANIFESTS) or holder_of(store) is not None:
        raise ConfigError(f"{url} is the checkpoint store of a run already; write another URL.")


def to_checkpoint(source: ModelFolder, store: Store, url: str, run_id: str, tick: Tick) -> str:
    """Writes the folder's weights as the only checkpoint of a store; returns the manifest's name.

    Args:
        run_id: the store belongs to a run of this id.
        tick: called with the bytes that were written.

    Raises:
        ConfigError: the store is in use, or a tensor is missing, has another shape, or is not a number.
    """
    check_new_store(store, url)
    tensors = folder_tensors(source)
    claim_store(store, url, run_id)
    checkpoints = Checkpoints(store, ATTEMPT, run_id)
    for _, folder in checkpoints.saves(ITERATION):  # of interrupted conversions; no manifest names them
        store.delete_folder(folder)
    prefix = checkpoints.prefix(ITERATION)
    try:
        bands = [band for row in source.model.rows for band in _bands(row)]
        named = [
            (shard_path(prefix, 0, number), some)
            for number, some in enumerate(in_files(bands, _band_bytes, FILE_BYTES))
        ]
        write = partial(_write_file, store, tensors)
        files = in_threads(named, write, tick)
        checkpoints.adopt(None)
        manifest = Manifest(
            iteration=ITERATION,
            attempt=ATTEMPT,
            run_id=run_id,
            config_hash="",
            files=tuple(files),
            common=msgspec.Raw(b"{}"),
            nodes=(),
        )
        checkpoints.commit(manifest)
    except BaseException:
        if not store.names(MANIFESTS):
            store.delete_folder(prefix)
        raise
    return checkpoints.name(manifest)


def folder_tensors(source: ModelFolder) -> dict[str, _Source]:
    """Returns the folder's tensors by name.

    Raises:
        ConfigError: one is missing, or has a shape or dtype that its config.json does not promise.
    """
    found: dict[str, _Source] = {}
    for file in sorted(source.path.glob("*.safetensors")):
        places = with_retries(partial(read_header, file))
        found |= {name: _Source(file, place) for name, place in places.items()}
    dtypes = {name: tensor.place.dtype for name, tensor in found.items()}
    shapes = without_scales({name: tensor.place.shape for name, tensor in found.items()}, dtypes)
    model = source.model
    if faults := [*tensor_faults(model, shapes)]:
        raise ConfigError(f"{source.path} {faults[0]}.")
    for name in file_shapes(model.rows):
        if (dtype := found[name].place.dtype) not in DTYPES:
            raise ConfigError(
                f"{source.path}: {name} is {dtype}; it must be one of {', '.join(DTYPES)}. A run reads FP8; "
                "its checkpoints and its exported model are not quantised."
            )
    return found


def checkpoint_bytes(source: ModelFolder) -> int:
    """Returns the bytes of the pieces that `to_checkpoint` writes."""
    return sum(math.prod(row.full_shape) * _element_bytes(row) for row in source.model.rows)


def _element_bytes(row: WeightRow) -> int:
    return 4 if row.is_fixed else 4 + 2


def _band_bytes(band: _Band) -> int:
    return math.prod(band.shape) * _element_bytes(band.row)


def _bands(row: WeightRow) -> Iterator[_Band]:
    height = max(1, CHUNK_BYTES // (4 * math.prod(row.full_shape[1:])))
    for begin in range(0, row.num_rows, height):
        yield _Band(row=row, begin=begin, end=min(begin + height, row.num_rows))


def _write_file(
    store: Store, tensors: dict[str, _Source], named: tuple[str, list[_Band]], tick: Tick
) -> ShardFile:
    path, bands = named
    pieces = [piece for band in bands for piece in _pieces(band)]

    def contents() -> Iterator[tuple[bytes]]:
        for band in bands:
            for data in _converted(tensors, band):
                yield (data,)
                tick(len(data))

    return write_file(store, path, pieces, contents)


def _pieces(band: _Band) -> Iterator[PlannedPiece]:
    """Plans the pieces of `_converted`."""
    both = (("main", "float32"), ("model", "bfloat16"))
    for kind, dtype in both[:1] if band.row.is_fixed else both:
        yield PlannedPiece(
            key=f"{kind}.{band.row.name}",
            dtype=dtype,
            global_shape=band.row.full_shape,
            global_offset=(band.begin, *(0 for _ in band.shape[1:])),
            local_shape=band.shape,
            area="",
            at=0,
            size_bytes=math.prod(band.shape) * PIECE_ITEM_BYTES[dtype],
        )


def _converted(tensors: dict[str, _Source], band: _Band) -> Iterator[bytes]:
    """Yields the bytes of a band: of the main copy, and of the parameter rounded from it.

    Raises:
        ConfigError: an element is not a number.
    """
    import numpy as np

    parts = []
    for span in spans_within(file_spans(band.row), band.begin, band.end):
        tensor = tensors[span.name]
        parts.append(_elements(tensor, span, math.prod(band.shape[1:])))
        if np.isnan(parts[-1]).any():
            raise ConfigError(f"{tensor.file}: {span.name} has elements that are not numbers.")
    values = np.concatenate(parts)
    yield values.tobytes()
    if not band.row.is_fixed:
        yield _as_bfloat16(values)


def _elements(tensor: _Source, span: RowSpan, columns: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """The rows of a span, one after the other."""
    dtype = tensor.place.dtype
    size_bytes, rows = columns * ITEM_BYTES[dtype], math.prod(tensor.place.shape[1:]) // columns
    first = span.first + (span.block or 0) * rows
    if span.block is None or tensor.place.shape[1] == rows:
        return _as_float32(dtype, _read(tensor, first * size_bytes, span.num_rows * size_bytes))
    data = _read(tensor, span.block * rows * size_bytes, rows * size_bytes)
    block = _as_float32(dtype, data).reshape(columns, rows)
    return block[:, span.first : span.first + span.num_rows].T.flatten()


def _read(tensor: _Source, begin: int, size_bytes: int) -> bytes:
    def read() -> bytes:
        with tensor.file.open("rb", buffering=0) as file:
            found = os.pread(file.fileno(), size_bytes, tensor.place.begin + begin)
        if len(found) != size_bytes:
            raise invalid_file(tensor.file, "ends within a tensor")
        return found

    return with_retries(read)


def _as_float32(dtype: str, data: bytes) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype]).astype("<f4")


def _as_bfloat16(values: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> bytes:
    """Rounds to the nearest, ties to even, as torch does; there are no NaNs."""
    bits = values.view("<u4")
    return bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes())
