"""The files of a checkpoint's shards, and the orders that make them: take a snapshot, upload it."""

from typing import Annotated, ClassVar

import msgspec

from yatt.records.order import Message, Order

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
"""A number of bytes, elements or iterations. What is decoded may come from a stranger's store: a sum of a few
of these fits into 64 bits."""

Word = Annotated[str, msgspec.Meta(max_length=512)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]


class TensorPiece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor in a shard file: a box of the whole tensor `key`. Its name in the file is its index.

    `begin` and `size_bytes` are its place in the file; `checksum` is that of these bytes
    (`yatt.checkpoint.commit.pieces`).
    """

    key: Word
    dtype: Word
    global_shape: Shape
    global_offset: Shape
    local_shape: Shape
    begin: Count
    size_bytes: Count
    checksum: Word


class ShardFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint; `path` is relative to the checkpoint store."""

    path: str
    size_bytes: Count
    checksum: Word
    tensors: tuple[TensorPiece, ...] = ()


class PlannedPiece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece before it is written: `at` is its first byte in the data of the host copy's segment `area`."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    area: str
    at: int
    size_bytes: int


class SavePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files that one rank's snapshot becomes, each a tuple of pieces; the same for every save."""

    rank: int
    files: tuple[tuple[PlannedPiece, ...], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size_bytes for pieces in self.files for piece in pieces)


class StateFile(msgspec.Struct, frozen=True, kw_only=True):
    """A controller's file of a checkpoint (`control.rollouts.groups.carried`); `path` is relative to the
    store."""

    path: str
    size_bytes: Count
    checksum: str


class SnapshotTaken(Message, frozen=True, kw_only=True):
    """The host copy is of the iteration, of a rank or of all of a node's. `common` is JSON of values that all
    ranks share (rank 0 fills it); `size_bytes` is what this part of a checkpoint has."""

    common: bytes
    size_bytes: int


class TakeSnapshot(Order[SnapshotTaken], frozen=True, kw_only=True):
    """Order to bring host copies up to date, which must be of this iteration: from the leader to a trainer
    node, which takes the state of its prompt groups too, and from there to its ranks."""

    under_lease: ClassVar[bool] = True

    iteration: int


class Uploaded(Message, frozen=True, kw_only=True):
    """The files that were written. `local_fault`: why this node's disk does not have them too; empty if it
    does, or if there is no local tier. `local_s`: seconds that writing them there took. The node adds the
    file of its prompt groups, and its host."""

    files: tuple[ShardFile, ...]
    state: StateFile = StateFile(path="", size_bytes=0, checksum="")
    host: str = ""
    local_fault: str = ""
    local_s: float = 0.0


class Upload(Order[Uploaded], frozen=True, kw_only=True):
    """Order to write the snapshots of a node's ranks to the checkpoint store: from the leader to a trainer
    node, and from there to its uploader.

    `url`: a prefix that only this attempt uses. `stems`: paths of the ranks' host copies, which the node
    adds. `committed`: prefix of the newest committed save, which stays in the local tier; empty if there is
    none. `is_local`: write them to the local tier only.
    """

    iteration: int
    url: str
    stems: tuple[str, ...] = ()
    committed: str = ""
    is_local: bool = False


class Detached(Message, frozen=True, kw_only=True):
    """The host copies may change. `size_bytes` had to be copied out."""

    size_bytes: int


class Detach(Order[Detached], frozen=True, kw_only=True):
    """Order to the uploader to copy out what it has not uploaded yet of these areas of the host copies, as
    they will change."""

    areas: tuple[str, ...]
