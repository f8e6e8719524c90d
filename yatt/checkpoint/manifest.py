"""The list of a checkpoint's files, and the one write that makes it exist. No torch.

Layout under the checkpoint URL::

    global_step_N/EPOCH-NONCE/rank-*.safetensors   one attempt's shards: no two attempts share a prefix
    manifests/0000000N.json                        written last, conditionally: this is the commit
    latest_checkpointed_iteration.txt              a hint for other people's scripts, after the commit

A checkpoint exists iff its manifest does and every file in it has its size. Resume lists manifests,
newest first, and says why it passed one over; the hint is never read.
"""

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from yatt.checkpoint.store import Store
from yatt.errors import CheckpointError
from yatt.records.message import ShardFile

SCHEMA_VERSION = 1
LATEST_HINT = "latest_checkpointed_iteration.txt"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One committed checkpoint. `common` and `nodes` are JSON: the trainer's scalars, the controllers'
    states; `row` is the metrics line of the iteration, which is completed after resume."""

    schema_version: int = SCHEMA_VERSION
    iteration: int
    epoch: int
    config_hash: str
    files: tuple[ShardFile, ...]
    common: msgspec.Raw
    nodes: tuple[msgspec.Raw, ...]
    row: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint to resume from, if any, and why newer ones were passed over."""

    manifest: Manifest | None
    name: str
    skipped: tuple[str, ...]


class Checkpoints:
    """The committed checkpoints of one run."""

    def __init__(self, store: Store, epoch: int) -> None:
        self._store, self._epoch = store, epoch

    def prefix(self, iteration: int) -> str:
        """A fresh folder for one save: private to this attempt and this try."""
        return f"global_step_{iteration}/{self._epoch:06d}-{secrets.token_hex(4)}"

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint exist.

        Raises:
            CheckpointError: a file is not there as promised, or another attempt committed this iteration.
        """
        reason = self._fault(manifest)
        if reason:
            raise CheckpointError(f"checkpoint {manifest.iteration} is not committed: {reason}")
        if not self._store.create(_name(manifest.iteration), msgspec.json.encode(manifest)):
            raise CheckpointError(f"checkpoint {manifest.iteration} was committed by another attempt")
        self._store.write(LATEST_HINT, f"{manifest.iteration}\n".encode())

    def newest(self) -> Found:
        """The newest checkpoint that is whole."""
        skipped: list[str] = []
        for name in reversed(self._manifests()):
            try:
                manifest = self.read(f"manifests/{name}")
            except CheckpointError as error:
                skipped.append(str(error))
                continue
            reason = self._fault(manifest)
            if not reason:
                return Found(manifest, f"manifests/{name}", tuple(skipped))
            skipped.append(f"{name}: {reason}")
        return Found(None, "", tuple(skipped))

    def read(self, name: str) -> Manifest:
        """One manifest.

        Raises:
            CheckpointError: not there, not a manifest, or of an unknown schema version.
        """
        data = self._store.read(name)
        try:
            manifest = msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{name}: not a whole manifest ({error})") from error
        if manifest.schema_version != SCHEMA_VERSION:
            raise CheckpointError(
                f"{name}: schema version {manifest.schema_version}, known is {SCHEMA_VERSION}"
            )
        return manifest

    def retain(self, keep: int) -> list[int]:
        """Delete what a newer committed checkpoint supersedes, all but the newest `keep`; gives which."""
        gone = []
        for name in self._manifests()[:-keep]:
            iteration = int(name.removesuffix(".json"))
            self._store.delete(f"manifests/{name}")
            self._store.delete_folder(f"global_step_{iteration}")
            gone.append(iteration)
        return gone

    def _manifests(self) -> list[str]:
        return [n for n in self._store.names("manifests") if n.removesuffix(".json").isdigit()]

    def _fault(self, manifest: Manifest) -> str:
        for file in manifest.files:
            size = self._store.size(file.path)
            if size != file.size_bytes:
                there = "is missing" if size is None else f"has {size} bytes instead of {file.size_bytes}"
                return f"{file.path} {there}"
        return ""


def _name(iteration: int) -> str:
    return f"manifests/{iteration:08d}.json"
