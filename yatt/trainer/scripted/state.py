"""The state of a scripted trainer: tensors of the model's shapes, whose every element follows from 32 bytes.

A tensor's elements repeat a pattern of 32 numbers, the state's bytes mixed with the tensor's name, so the
state can be read off any 32 consecutive elements, and one wrong byte anywhere is found. Each number is a byte
over 256, which float32 and bfloat16 have exactly. It is read from checkpoints, and written as a Hugging Face
folder.
"""

import hashlib
import itertools
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.commit.pieces import ITEM_BYTES, SAFETENSORS_NAMES, check_piece
from yatt.checkpoint.convert.hf_folder import FolderWriter, copy_side_files, planned_tensors
from yatt.checkpoint.local.local_first import Ranges
from yatt.config.schema import ModelSection
from yatt.errors import CheckpointError
from yatt.models.rows import WeightRow
from yatt.models.spans import file_spans

STATE_BYTES = 32
BLOCK_ELEMENTS = 1 << 15
"""Elements that are written at once; a multiple of the pattern's length."""

MODEL, MAIN, MOMENTS = "model", "main", ("exp_avg", "exp_avg_sq")
"""Kinds of tensors, as in checkpoints of the real trainer (`yatt.trainer.state.snapshot`)."""

_FLOATS = [struct.pack("<f", byte / 256) for byte in range(256)]
_BYTES = {"float32": {word: byte for byte, word in enumerate(_FLOATS)}}
_BYTES["bfloat16"] = {word[2:]: byte for byte, word in enumerate(_FLOATS)}


def state_after(state: bytes, *parts: bytes) -> bytes:
    """Returns the state that follows from a state and what happened."""
    digest = hashlib.blake2b(state, digest_size=STATE_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def state_elements(key: str, dtype: str, state: bytes, first: int, count: int) -> Iterator[bytes]:
    """Yields the bytes of a tensor's elements [first, first + count), in blocks.

    Args:
        key: kind and name of the tensor.
        dtype: float32 or bfloat16.
        first: index in the flattened tensor.
    """
    words = [word[4 - ITEM_BYTES[dtype] :] for word in _FLOATS]
    mixed = [words[byte ^ mask] for byte, mask in zip(state, _mask(key), strict=True)]
    turn = first % STATE_BYTES
    block = b"".join(mixed[turn:] + mixed[:turn]) * (BLOCK_ELEMENTS // STATE_BYTES)
    left = count * ITEM_BYTES[dtype]
    while left > 0:
        yield block if left >= len(block) else block[:left]
        left -= len(block)


def state_in(key: str, dtype: str, first: int, data: bytes) -> bytes | None:
    """Returns the state that a tensor's elements from `first` on show; None if they show none."""
    item, known = ITEM_BYTES[dtype], _BYTES[dtype]
    found = [known.get(data[at : at + item]) for at in range(0, STATE_BYTES * item, item)]
    if len(data) < STATE_BYTES * item or None in found:
        return None
    turn = -first % STATE_BYTES
    mixed = [byte for byte in found[turn:] + found[:turn] if byte is not None]
    return bytes(byte ^ mask for byte, mask in zip(mixed, _mask(key), strict=True))


def _mask(key: str) -> bytes:
    """Bytes that differ between tensors, but not between a parameter and its main copy."""
    kind, _, name = key.partition(".")
    key = f"{MAIN}.{name}" if kind == MODEL else key
    return hashlib.blake2b(key.encode(), digest_size=STATE_BYTES).digest()


def saved_state(ranges: Ranges, manifest: Manifest, rows: list[WeightRow], tick: Callable[[], None]) -> bytes:
    """Reads the saved pieces of these rows, and returns the one state that they show.

    Raises:
        CheckpointError: they are damaged or incomplete, or show no state or several.
    """
    shapes = {row.name: row.full_shape for row in rows}
    state: bytes | None = None
    later: list[tuple[str, str, int, bytes]] = []
    missing = {f"{MOMENTS[0]}.{name}": math.prod(shape) for name, shape in shapes.items()}
    for file in manifest.files:
        pieces = [piece for piece in file.tensors if piece.key.partition(".")[2] in shapes]
        for piece in pieces:
            (data,) = ranges.read_ranges(file.path, [(piece.begin, piece.begin + piece.size_bytes)])
            check_piece(file, piece, data)
            first = _flat_index(piece.global_offset, piece.global_shape)
            found = state_in(piece.key, piece.dtype, first, data)
            state = found if state is None else state
            later.append((piece.key, piece.dtype, first, data))
            if piece.key in missing:
                missing[piece.key] -= math.prod(piece.local_shape)
            tick()
            if state is not None:
                _check_content(state, later, file.path)
                later.clear()
    if state is None:
        raise CheckpointError(
            f"checkpoint {manifest.iteration}: no tensor of this rank shows a state of a scripted trainer"
        )
    if lacking := [key for key, number in missing.items() if number]:
        raise CheckpointError(f"checkpoint {manifest.iteration} lacks elements of {lacking[0]}")
    return state


def write_folder(
    folder: Path, section: ModelSection, rows: Sequence[WeightRow], state: bytes, tick: Callable[[], None]
) -> None:
    """Writes all weights as a Hugging Face folder; each file appears whole. Can be repeated.

    Raises:
        ConfigError: a file beside the model's weights cannot be copied.
        OSError: the folder cannot be written.
    """
    dtype = section.dtype
    key = MODEL if dtype != "float32" else MAIN
    folder.mkdir(exist_ok=True)  # no parents: do not recreate a removed run folder
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        kind = SAFETENSORS_NAMES[dtype]
        writer = FolderWriter(made, planned_tensors(rows, {row.name: kind for row in rows}))
        try:
            for row in rows:
                _write_row(writer, row, f"{key}.{row.name}", dtype, state)
                tick()
            writer.finish()
        finally:
            writer.close()
        for path in made.iterdir():
            os.replace(path, folder / path.name)
        copy_side_files(Path(section.path), folder, dtype)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_row(writer: FolderWriter, row: WeightRow, key: str, dtype: str, state: bytes) -> None:
    width, item = row.width or 1, ITEM_BYTES[dtype]
    for span in file_spans(row):
        if span.block is not None:
            whole = b"".join(state_elements(key, dtype, state, span.begin * width, span.num_rows * width))
            writer.write_box(span, whole, 0, width)
            continue
        at = span.first * width * item
        for block in state_elements(key, dtype, state, span.begin * width, span.num_rows * width):
            writer.write(span.name, at, block)
            at += len(block)


def _check_content(state: bytes, found: list[tuple[str, str, int, bytes]], path: str) -> None:
    for key, dtype, first, data in found:
        at = 0
        for block in state_elements(key, dtype, state, first, len(data) // ITEM_BYTES[dtype]):
            if data[at : at + len(block)] != block:
                raise CheckpointError(
                    f"{path}: {key} is not of the state that other tensors of the checkpoint are of"
                )
            at += len(block)


def _flat_index(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    strides = [*itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)][::-1]
    return sum(a * b for a, b in zip(offset, strides, strict=True))
