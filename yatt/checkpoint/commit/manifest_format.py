"""The list of a checkpoint's files: its fields, its seal, and the rules that every reader applies. No torch.

A manifest may come from a stranger, and anyone can seal one. So whatever it says is bounded here, once, where
it is decoded: its files are named as yatt names the files of this iteration and attempt, its numbers are in
ranges, its tensors lie within their files. A reader may use what it gets without further checks.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import Annotated

import msgspec

from yatt.checkpoint.commit.pieces import ITEM_BYTES
from yatt.core.attempts.checkpoint_names import path_fault
from yatt.core.attempts.claims import Commit
from yatt.errors import CheckpointError
from yatt.models.rows import OUTPUT
from yatt.printable import printable
from yatt.records.message import ShardFile, TensorPiece
from yatt.records.shards import Count, StateFile

SCHEMA_VERSION = 5
MOST_MANIFEST_BYTES = 1 << 30
"""A manifest has some 250 bytes per piece of a tensor: 140 MiB for 671 billion parameters."""

MOST_FILE_BYTES = 10_000 * (16 << 20)
"""An object store takes no larger file from us (`yatt.checkpoint.store.store`)."""

CRITIC_KEYS = "critic."
"""Begins the keys of a critic's tensors; then they are as the policy's."""

MOST_ELEMENTS = 1 << 50
"""Of a tensor."""

Scalar = None | bool | Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)] | float | str
Row = dict[str, Scalar]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Names = Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)]
InputDigests = Annotated[dict[str, Text], msgspec.Meta(max_length=1024)]
Scalars = dict[str, Scalar | Annotated[tuple[Scalar, ...], msgspec.Meta(max_length=16)]]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One committed checkpoint. `common` is JSON, the trainer's scalars; `nodes` are the files of the trainer
    nodes' controllers, by node; `row` is the iteration's row of metrics, which is completed after resume. In
    `row` and `unwritten`, numbers that are not finite have names (`yatt.obs.metrics.strict_row`).

    `parent` is the (iteration, attempt) of the checkpoint that its start resumed from. `seal` is the SHA-256
    of the manifest, encoded with an empty seal.
    """

    schema_version: int = SCHEMA_VERSION
    seal: str = ""
    iteration: Count
    attempt: Count
    parent: tuple[Count, Count] = (0, 0)
    run_id: Text = ""
    config_hash: Text
    files: tuple[ShardFile, ...]
    common: msgspec.Raw
    nodes: tuple[StateFile, ...]
    row: Row = msgspec.field(default_factory=dict)
    unwritten: tuple[Row, ...] = ()
    """Rows of earlier iterations that were not in the metrics file yet."""

    inputs: InputDigests | msgspec.UnsetType = msgspec.UNSET
    """Digests of the attempt's inputs (`yatt.core.attempts.inputs`). Checkpoints of older yatts have none."""


class OptimizerScalars(msgspec.Struct, frozen=True, kw_only=True):
    """Scalars of an optimizer in a checkpoint.

    Args:
        step: updates of each parameter; None: no optimizer was saved.
        moments: names of the optimizer's moments.
        param_groups: scalars of its parameter groups.
        scheduler: of the schedule of learning rates.
    """

    step: float | None = None
    moments: Names = ("exp_avg", "exp_avg_sq")
    param_groups: Annotated[tuple[Scalars, ...], msgspec.Meta(max_length=1024)] = ()
    scheduler: Scalars = msgspec.field(default_factory=dict)


class SavedScalars(OptimizerScalars, frozen=True, kw_only=True):
    """The trainer's scalars in a checkpoint; a checkpoint of weights only has none.

    Args:
        kl_coef: coefficient of the KL penalty; None in older checkpoints.
        trainer: `model.trainer` of the run.
        critic: of the critic's optimizer; None: the run had no critic.
    """

    kl_coef: float | None = None
    trainer: Text = "megatron"
    critic: OptimizerScalars | None = None


class _Version(msgspec.Struct, frozen=True):
    """The part of a manifest that all versions have."""

    schema_version: int


def read_manifest(data: bytes, where: str, run_id: str) -> Manifest:
    """Decodes a sealed manifest.

    Args:
        where: the place that it is from, for messages.
        run_id: of the run that it must be of; empty: of any.

    Raises:
        CheckpointError: it is not whole, differs from its seal, has an unknown version, or says what no
            checkpoint of yatt does.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            age = "an older" if version < SCHEMA_VERSION else "a newer"
            raise CheckpointError(
                f"has format {version}, and this yatt reads format {SCHEMA_VERSION} only; {age} yatt wrote "
                "it, which can go on with it",
                of=where,
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"not a whole manifest ({error})", of=where) from error
    except RecursionError as error:
        raise CheckpointError("not a manifest of yatt: it is nested too deeply", of=where) from error
    if data != sealed_manifest(manifest):
        raise CheckpointError("its content is not what was sealed", of=where)
    if fault := manifest_fault(manifest):
        raise CheckpointError(f"not a manifest of yatt: {fault}", of=where)
    if run_id and manifest.run_id != run_id:
        raise CheckpointError(f"is of run {printable(manifest.run_id)}; this run is {run_id}", of=where)
    return manifest


def sealed_manifest(manifest: Manifest) -> bytes:
    """Returns the manifest's bytes, with its seal."""
    plain = msgspec.structs.replace(manifest, seal="")
    digest = hashlib.sha256(msgspec.json.encode(plain)).hexdigest()
    return msgspec.json.encode(msgspec.structs.replace(plain, seal=digest))


def saved_scalars(manifest: Manifest) -> SavedScalars:
    """Returns the trainer's scalars of a manifest.

    Raises:
        CheckpointError: they are not such scalars; not of a manifest that was read.
    """
    try:
        return msgspec.json.decode(bytes(manifest.common), type=SavedScalars)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"the trainer's scalars cannot be read ({error})") from error


def commit_of(manifest: Manifest) -> Commit:
    """Returns the commit that a manifest makes."""
    return Commit(manifest.iteration, manifest.attempt)


def weights_commit(manifest: Manifest) -> Commit:
    """Returns the first commit of these weights: the parent's, if a start that restored a local commit has
    only uploaded it."""
    parent, own = Commit(*manifest.parent), commit_of(manifest)
    return parent if parent.iteration == own.iteration else own


def prefix_of(manifest: Manifest) -> str:
    """Returns the folder of a save; empty if it has no files."""
    return manifest.files[0].path.rpartition("/")[0] if manifest.files else ""


# ---- rules --------------------------------------------------------------------------------------


def manifest_fault(manifest: Manifest) -> str:
    """Returns the first thing that no manifest of yatt says; empty if there is none."""
    return next(_faults(manifest), "")


def _faults(manifest: Manifest) -> Iterator[str]:
    files: list[ShardFile | StateFile] = [*manifest.files, *manifest.nodes]
    commit = commit_of(manifest)
    for file in files:
        if fault := path_fault(file.path, commit):
            yield fault
        if file.size_bytes > MOST_FILE_BYTES:
            yield f"{file.path} cannot have {file.size_bytes} bytes, at most {MOST_FILE_BYTES}"
    if len({file.path.rpartition("/")[0] for file in files}) > 1:
        yield "its files are in several folders"
    if len({file.path for file in files}) < len(files):
        yield "it names a file twice"
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for shard in manifest.files:
        yield from _tensor_faults(shard, tensors)
    try:
        saved_scalars(manifest)
    except CheckpointError as error:
        yield str(error)


def _tensor_faults(shard: ShardFile, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Iterator[str]:
    """Yields faults of a file's pieces.

    Args:
        tensors: dtype and shape of each tensor so far; this file's are added.
    """
    end = 0
    for piece in shard.tensors:
        if fault := _piece_fault(piece):
            yield f"{shard.path}: {_shown(piece.key)} {fault}"
        if piece.begin < end:
            yield f"{shard.path}: the bytes of {_shown(piece.key)} overlap others"
        end = piece.begin + piece.size_bytes
        kind = (piece.dtype, piece.global_shape)
        if tensors.setdefault(piece.key, kind) != kind:
            yield f"{_shown(piece.key)} has pieces of different tensors"
    if end > shard.size_bytes:
        yield f"{shard.path}: its tensors end at byte {end}, the file at {shard.size_bytes}"


def _piece_fault(piece: TensorPiece) -> str:
    item = ITEM_BYTES.get(piece.dtype)
    if item is None:
        return f"has the unknown dtype '{_shown(piece.dtype)}'"
    shape, offset, part = piece.global_shape, piece.global_offset, piece.local_shape
    if not len(shape) == len(offset) == len(part):
        return "has a part with another number of dimensions than the whole"
    if math.prod(shape) > MOST_ELEMENTS:
        return f"cannot have the shape {shape}"
    if any(first + size > whole for first, size, whole in zip(offset, part, shape, strict=True)):
        return f"has a part outside of its shape {shape}"
    if math.prod(part) * item != piece.size_bytes:
        return f"has a part of shape {part} in {piece.size_bytes} bytes of {piece.dtype}"
    return ""


def _shown(text: str) -> str:
    return printable(text if len(text) <= 120 else f"{text[:117]}...")


def has_value_head(manifest: Manifest) -> bool:
    """Whether a checkpoint is of a model with a value head in its output layer's place: a reward model."""
    pieces = (piece for file in manifest.files for piece in file.tensors)
    return any(
        piece.key.partition(".")[2] == OUTPUT and piece.global_shape[0] == 1
        for piece in pieces
        if not piece.key.startswith(CRITIC_KEYS)
    )
