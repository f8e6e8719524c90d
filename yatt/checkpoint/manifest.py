"""A checkpoint exists iff its manifest does: commit, find, verify, retire. No torch here.

The manifest is created last and only if there is none of that iteration, so a stale attempt cannot
replace a commit. What is listed is not what is true: finding the newest checkpoint verifies that
every file it names is there with its size, and falls back to the one before, saying why.
"""

import json

import msgspec

from yatt.checkpoint.format import SCHEMA_VERSION, FileEntry, Manifest, digest
from yatt.checkpoint.store import Store
from yatt.errors import CheckpointError

MANIFESTS = "manifests"
MARKER = "latest_checkpointed_iteration.txt"
"""For other people's scripts only; nothing here reads it."""


def attempt_prefix(iteration: int, epoch: int, nonce: str) -> str:
    """Folder of one attempt's files, never used twice."""
    return f"global_step_{iteration}/{epoch}-{nonce}"


def manifest_name(iteration: int) -> str:
    """Name of an iteration's manifest; names sort like iterations."""
    return f"{MANIFESTS}/{iteration:010d}.json"


def write_state(store: Store, prefix: str, name: str, data: bytes) -> FileEntry:
    """Write a controller's state as `name`.json under the prefix; goes into `Manifest.states`."""
    path = f"{name}.json"
    store.write(f"{prefix}/{path}", data)
    return FileEntry(path=path, size_bytes=len(data), sha256=digest(data))


def read_state(store: Store, manifest: Manifest, name: str) -> bytes:
    """A controller's state.

    Raises:
        CheckpointError: absent, or not what was written.
    """
    if name not in manifest.states:
        raise CheckpointError(f"{manifest_name(manifest.iteration)} has no state {name!r}")
    return read_verified(store, manifest.prefix, manifest.states[name])


def read_verified(store: Store, prefix: str, entry: FileEntry) -> bytes:
    """A file's bytes, if they are the ones that were written.

    Raises:
        CheckpointError: absent, short, or other bytes.
    """
    data = store.read(f"{prefix}/{entry.path}")
    if len(data) != entry.size_bytes or digest(data) != entry.sha256:
        raise CheckpointError(
            f"{prefix}/{entry.path} is not what was saved: {len(data)} of {entry.size_bytes} bytes, "
            f"sha256 {digest(data)[:12]} instead of {entry.sha256[:12]}"
        )
    return data


def commit(store: Store, manifest: Manifest) -> None:
    """Make the checkpoint exist. Committing the same manifest again does nothing.

    Raises:
        CheckpointError: the iteration has another manifest, or a file of this one is missing.
    """
    faults = _faults(store, manifest)
    if faults:
        raise CheckpointError(f"iteration {manifest.iteration} is not committed: {'; '.join(faults)}")
    name, data = manifest_name(manifest.iteration), msgspec.json.encode(manifest)
    if not store.create(name, data) and store.read(name) != data:
        raise CheckpointError(f"{name} is there already, from another attempt; it is not replaced")
    store.write(MARKER, f"{manifest.iteration}\n".encode())


def read_manifest(store: Store, name: str) -> Manifest:
    """A manifest by name.

    Raises:
        CheckpointError: absent, torn, or of another schema version.
    """
    data = store.read(name)
    try:
        version = json.loads(data).get("schema_version")
        if version != SCHEMA_VERSION:
            raise CheckpointError(f"{name} has schema version {version}; this yatt reads {SCHEMA_VERSION}")
        return msgspec.json.decode(data, type=Manifest)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{name} is not a manifest: {error}") from error


def newest_committed(store: Store) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint whose files are all there, and why newer ones were passed over."""
    reasons: list[str] = []
    for name in reversed(_manifest_names(store)):
        try:
            manifest = read_manifest(store, name)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        faults = _faults(store, manifest)
        if not faults:
            return manifest, reasons
        reasons.append(f"{name}: {'; '.join(faults)}")
    return None, reasons


def retain(store: Store, keep: int) -> list[str]:
    """Remove what `keep` newer whole checkpoints supersede; gives the names of removed manifests.

    A manifest goes before its files, so that none ever names what is not there. Files that were
    never committed go once they are older than the oldest checkpoint kept.
    """
    kept: list[int] = []
    removed: list[str] = []
    for name in reversed(_manifest_names(store)):
        if len(kept) >= keep:
            store.remove(name)
            removed.append(name)
        elif _is_whole(store, name):
            kept.append(int(name.rsplit("/", 1)[1].removesuffix(".json")))
    if len(kept) >= keep:
        for folder in store.names(""):
            number = folder.removeprefix("global_step_")
            if number != folder and number.isdigit() and int(number) < kept[-1]:
                store.remove(folder)
    return removed


def _is_whole(store: Store, name: str) -> bool:
    try:
        return not _faults(store, read_manifest(store, name))
    except CheckpointError:
        return False


def _manifest_names(store: Store) -> list[str]:
    return [f"{MANIFESTS}/{name}" for name in store.names(MANIFESTS) if name.endswith(".json")]


def _faults(store: Store, manifest: Manifest) -> list[str]:
    faults = []
    for entry in (*manifest.files, *manifest.states.values()):
        size = store.size(f"{manifest.prefix}/{entry.path}")
        if size is None:
            faults.append(f"{entry.path} is missing")
        elif size != entry.size_bytes:
            faults.append(f"{entry.path} has {size} of {entry.size_bytes} bytes")
    return faults
