"""Writes the weights of a checkpoint as a Hugging Face folder: no torch, no tensor in memory.

Each piece of a shard file is read once, verified, and its rows are written to their places in the folder's
files. So memory is bounded by the pieces that are in flight, whatever layout the checkpoint was saved in.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import CRITIC_KEYS, Manifest
from yatt.checkpoint.commit.pieces import ITEM_BYTES, SAFETENSORS_NAMES, check_piece
from yatt.checkpoint.commit.verifying import incomplete_tensors
from yatt.checkpoint.convert.hf_folder import (
    FILE_BYTES,
    FolderWriter,
    copy_side_files,
    planned_tensors,
    whole_folder,
)
from yatt.checkpoint.store.store import Store
from yatt.checkpoint.store.streams import CHUNK_BYTES, Tick, in_threads
from yatt.errors import CheckpointError, ConfigError
from yatt.models.folder import ModelFolder
from yatt.models.rows import WeightRow
from yatt.models.spans import RowSpan, file_spans, spans_within
from yatt.records.message import ShardFile, TensorPiece

KINDS = ("model", "main")
"""Kinds of weights in a checkpoint, the better first: in float32 a run saves only main copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Consecutive pieces of one file that are read in one call."""

    file: ShardFile
    pieces: tuple[TensorPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderForm:
    """What a folder of weights is like.

    Attributes:
        dtype: of the weights, as `float32`; empty: of the model's own copy, which a run samples with.
        file_bytes: most bytes of the tensors of a file.
        prefix: begins the keys of the weights: empty, or `CRITIC_KEYS` for the critic's.
    """

    dtype: str = ""
    file_bytes: int = FILE_BYTES
    prefix: str = ""


def export_as_hf(
    checkpoints: Checkpoints,
    name: str,
    source: ModelFolder,
    target: Path,
    tick: Tick,
    form: "FolderForm | None" = None,
) -> str:
    """Writes the checkpoint of this manifest as a folder that must not exist.

    Args:
        source: the policy's or critic's model, which gives config and tokenizer.
        tick: called with the bytes of pieces that were read.
        form: None: the defaults.

    Returns:
        The dtype of the weights. A few parameters may have another, as in the model's own folder.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete.
        ConfigError: it is of another model, or the target exists.
    """
    manifest = checkpoints.read(name)
    form = form or FolderForm()
    kinds, model = _kinds(manifest, source, form), source.model
    rows = {f"{form.prefix}{kinds[row.name][0]}.{row.name}": row for row in model.rows}
    dtypes = {row.name: SAFETENSORS_NAMES[kinds[row.name][1]] for row in model.rows}
    if damages := [each for key, each in incomplete_tensors(manifest, name).items() if key in rows]:
        raise CheckpointError(str(damages[0]))
    free = [kinds[row.name][1] for row in model.rows if not row.is_fixed]
    written = max(set(free), key=free.count)
    tensors = planned_tensors(model.rows, dtypes)
    with whole_folder(target) as folder:
        copy_side_files(source.path, folder, written, has_score=model.has_value_head)
        writer = FolderWriter(folder, tensors, form.file_bytes)
        try:
            spans = {key: file_spans(row) for key, row in rows.items()}
            work = partial(_copy, checkpoints.store, writer, spans)
            in_threads(_groups(manifest, rows), work, tick)
            writer.finish()
        finally:
            writer.close()
    return written


def check_is_of(manifest: Manifest, source: ModelFolder) -> None:
    """Checks that a checkpoint has the weights of a model.

    Raises:
        ConfigError: it lacks some, or they have other shapes.
    """
    _kinds(manifest, source, FolderForm())


def weight_bytes(manifest: Manifest, form: FolderForm | None = None) -> int:
    """Returns the bytes that `export_as_hf` reads for weights of this form."""
    form = form or FolderForm()
    sizes = dict.fromkeys(KINDS, 0)
    for key, piece in _pieces_of(manifest, form.prefix):
        if form.dtype and piece.dtype != form.dtype:
            continue
        kind = key.partition(".")[0]
        sizes[kind] = sizes.get(kind, 0) + piece.size_bytes
    return sizes["model"] or sizes["main"]


def _pieces_of(manifest: Manifest, prefix: str) -> Iterator[tuple[str, TensorPiece]]:
    """Yields the pieces of the policy, or of the critic, with their keys after the prefix."""
    for piece in (piece for file in manifest.files for piece in file.tensors):
        if piece.key.startswith(CRITIC_KEYS) == bool(prefix):
            yield piece.key.removeprefix(prefix), piece


def _kinds(manifest: Manifest, source: ModelFolder, form: FolderForm) -> dict[str, tuple[str, str]]:
    """Maps each parameter to the kind of weights that is taken, and to its dtype.

    Raises:
        ConfigError: the checkpoint is of another model, or has no weights of that dtype, or no critic.
    """
    saved, dtype = dict(_pieces_of(manifest, form.prefix)), form.dtype
    if not saved:
        raise ConfigError(
            f"--critic: checkpoint {manifest.iteration} has no critic, because its run had another "
            "algorithm.adv_estimator than gae; leave --critic out for the policy."
        )
    found = {}
    for row in source.model.rows:
        kinds = tuple(reversed(KINDS)) if row.is_fixed else KINDS
        there = [kind for kind in kinds if f"{kind}.{row.name}" in saved]
        kind = next(iter(there), None)
        if dtype and there and not row.is_fixed:
            kind = next((each for each in there if saved[f"{each}.{row.name}"].dtype == dtype), None)
            if kind is None:
                has = " and ".join(dict.fromkeys(saved[f"{each}.{row.name}"].dtype for each in there))
                raise ConfigError(f"--dtype {dtype}: the checkpoint has {row.name} in {has} only.")
        if kind is None:
            raise ConfigError(
                f"{source.path} is not this checkpoint's model: the checkpoint has no {row.name}."
            )
        piece = saved[f"{kind}.{row.name}"]
        if piece.global_shape != row.full_shape:
            raise ConfigError(
                f"{source.path} is not this checkpoint's model: {row.name} was saved with shape "
                f"{piece.global_shape}, and the folder's config.json promises {row.full_shape}."
            )
        found[row.name] = kind, piece.dtype
    names = {key.partition(".")[2] for key in saved}
    if unknown := sorted(names - found.keys()):
        raise ConfigError(
            f"{source.path} is not this checkpoint's model: it has no {unknown[0]}, which was saved."
        )
    return found


def _groups(manifest: Manifest, rows: Mapping[str, WeightRow]) -> Iterator[_Group]:
    for file in manifest.files:
        pieces = [piece for piece in file.tensors if piece.key in rows]
        total = itertools.accumulate(piece.size_bytes for piece in pieces)
        ends = zip(total, pieces, strict=True)
        for _, some in itertools.groupby(ends, lambda pair: pair[0] // CHUNK_BYTES):
            yield _Group(file=file, pieces=tuple(piece for _, piece in some))


def _copy(
    store: Store, writer: FolderWriter, spans: Mapping[str, list[RowSpan]], group: _Group, tick: Tick
) -> None:
    ranges = [(piece.begin, piece.begin + piece.size_bytes) for piece in group.pieces]
    for piece, data in zip(group.pieces, store.read_ranges(group.file.path, ranges), strict=True):
        check_piece(group.file, piece, data)
        _scatter(writer, spans[piece.key], piece, memoryview(data))
        tick(len(data))


def _scatter(writer: FolderWriter, spans: list[RowSpan], piece: TensorPiece, data: memoryview) -> None:
    """Writes a box of a parameter to the rows of Hugging Face tensors that it is made of."""
    item = ITEM_BYTES[piece.dtype]
    width = piece.local_shape[1] if len(piece.local_shape) > 1 else 1
    column = piece.global_offset[1] if len(piece.global_offset) > 1 else 0
    begin, end = piece.global_offset[0], piece.global_offset[0] + piece.local_shape[0]
    for span in spans_within(spans, begin, end):
        rows = data[(span.begin - begin) * width * item : (span.end - begin) * width * item]
        writer.write_box(span, rows, column, width)
