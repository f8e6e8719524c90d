"""What a manifest records: files, and which box of which global tensor each of them holds.

A checkpoint is ``<url>/global_step_N/<attempt>/rank-*.safetensors`` plus one JSON manifest,
``<url>/manifests/<N>.json``. No file holds code or pickles. No torch here.
"""

import hashlib
from typing import Any

import msgspec

from yatt.records.message import ShardFile

SCHEMA_VERSION = 1


class TensorBox(msgspec.Struct, frozen=True, array_like=True):
    """Tensor `name` of a file is the box of `shape` at `offset` in the global tensor `key`."""

    name: str
    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file, relative to the manifest's prefix."""

    path: str
    size_bytes: int
    sha256: str
    tensors: tuple[TensorBox, ...] = ()


class World(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layout that saved; any other can load."""

    world_size: int
    tensor: int
    pipeline: int
    context: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One committed checkpoint.

    `common` is what is the same on every trainer rank; `states` are controllers' states by name.
    """

    schema_version: int = SCHEMA_VERSION
    iteration: int
    policy_version: int
    epoch: int
    config_hash: str
    world: World
    prefix: str
    files: tuple[FileEntry, ...]
    common: dict[str, Any]
    states: dict[str, FileEntry] = {}


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def entry_of(shard: ShardFile) -> FileEntry:
    """The manifest's entry of a file a trainer rank reported."""
    tensors = msgspec.msgpack.decode(shard.tensors, type=tuple[TensorBox, ...])
    return FileEntry(path=shard.path, size_bytes=shard.size_bytes, sha256=shard.sha256, tensors=tensors)
