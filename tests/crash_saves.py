"""A small rank, and the saves of an attempt, for tests that kill it at any point."""

import os
from pathlib import Path

import msgspec
import torch

from yatt.adapters.node_local.host_segment import SegmentReader, SegmentWriter, Stamp, plan_path, segment_path
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.commit.pieces import check_piece
from yatt.checkpoint.commit.retention import apply_retention
from yatt.checkpoint.local.shards import Shard, read_shards
from yatt.checkpoint.store.store import Store
from yatt.config.sections.operation import CheckpointSection
from yatt.errors import WorkerFailed
from yatt.records.message import PlannedPiece, SavePlan
from yatt.uploader.upload import Throttle, UploadJob

PIECES, BYTES = 2, 4000
SAVES = (2, 3, 4, 5)
"""Iterations that the killed attempt saves."""


class Rank:
    """A trainer rank: each byte of its state is the iteration's number.

    Args:
        num_files: files of a save, each of two pieces.
    """

    def __init__(self, memory: Path, attempt: int, num_files: int) -> None:
        self.stem, self._attempt = memory / f"rank-{attempt:05d}", attempt
        pieces = [self._piece(number) for number in range(num_files * PIECES)]
        files = tuple(tuple(pieces[i : i + PIECES]) for i in range(0, len(pieces), PIECES))
        self._segment = SegmentWriter(segment_path(self.stem, "weights"), len(pieces) * BYTES)
        plan_path(self.stem).write_bytes(msgspec.msgpack.encode(SavePlan(rank=0, files=files)))

    def _piece(self, number: int) -> PlannedPiece:
        return PlannedPiece(
            key=f"main.p{number}", dtype="uint8", global_shape=(BYTES,), global_offset=(0,),
            local_shape=(BYTES,), area="weights", at=number * BYTES, size_bytes=BYTES,
        )  # fmt: skip

    def copies(self, iteration: int) -> Stamp:
        self._segment.invalidate()
        half = len(self._segment.data) // 2
        self._segment.data[:half] = bytes([iteration]) * half
        os.stat(self.stem.parent)  # a point to be killed at, between two halves
        self._segment.data[half:] = bytes([iteration]) * (len(self._segment.data) - half)
        self._segment.complete(Stamp(self._attempt, iteration))
        return Stamp(self._attempt, iteration)


def attempt_of(
    store: Store, memory: Path, attempt: int, iterations: tuple[int, ...], num_files: int = 9
) -> None:
    """An attempt: it restores the newest checkpoint, and saves these iterations."""
    checkpoints = Checkpoints(store, attempt)
    found = checkpoints.newest().manifest
    checkpoints.adopt(found)
    if found is not None:
        restore(store, found)
    rank = Rank(memory, attempt, num_files)
    for iteration in iterations:
        save(rank, store, checkpoints, attempt, iteration)


def restore(store: Store, manifest: Manifest) -> None:
    """What a trainer rank reads."""
    keys = {piece.key for file in manifest.files for piece in file.tensors}
    wanted = [
        Shard(key=key, tensor=torch.zeros(BYTES, dtype=torch.uint8), global_shape=(BYTES,), offset=(0,))
        for key in sorted(keys)
    ]
    read_shards(store, manifest.files, wanted)
    assert all(set(shard.tensor.tolist()) == {manifest.iteration} for shard in wanted)


def save(rank: Rank, store: Store, checkpoints: Checkpoints, attempt: int, iteration: int) -> None:
    """What trainer, uploader and leader do for one save."""
    prefix, stamp = checkpoints.prefix(iteration), rank.copies(iteration)
    job = UploadJob(store, prefix, [rank.stem], stamp, throttle=Throttle(0), tick=lambda: None)
    files = job.run()
    job.close()
    common = msgspec.Raw(b"{}")
    checkpoints.commit(
        Manifest(
            iteration=iteration, attempt=attempt, parent=checkpoints.parent, config_hash="", files=files,
            common=common, nodes=(),
        )
    )  # fmt: skip
    apply_retention(checkpoints, CheckpointSection(keep=2))


def whole_checkpoint(store: Store) -> int:
    """What the next start finds: a whole checkpoint, all bytes of one iteration, which is returned."""
    found = Checkpoints(store, 3).newest().manifest
    assert found is not None, "there is a whole checkpoint"
    for file in found.files:
        for piece in file.tensors:
            (data,) = store.read_ranges(file.path, [(piece.begin, piece.begin + piece.size_bytes)])
            check_piece(file, piece, data)
            assert set(data) == {found.iteration}, "bytes of another iteration"
    return found.iteration


def state_of(memory: Path) -> str:
    """The killed attempt's host copy: absent, being changed, or whole."""
    try:
        reader = SegmentReader(segment_path(memory / "rank-00002", "weights"))
    except WorkerFailed:
        return "absent"
    stamp = reader.stamp()
    if stamp is not None:
        assert set(bytes(reader.data)) == {stamp.version}, "a stamp over a mix"
    reader.close()
    return "changing" if stamp is None else "whole"
