"""Copies one committed checkpoint to another store, verified while it is streamed. No torch.

Names and bytes stay the same, so the copy belongs to the same run, and another run can start from it
(`run.from_checkpoint`). The manifest is written last. A copy that fails removes what it has written, and
nothing else; it can be repeated.
"""

from functools import partial

from yatt.checkpoint.commit.manifest import Checkpoints, adoption_record
from yatt.checkpoint.commit.manifest_format import Manifest, sealed_manifest
from yatt.checkpoint.commit.ownership import claim_store, store_owner
from yatt.checkpoint.commit.verifying import files_of
from yatt.checkpoint.store.store import Store
from yatt.checkpoint.store.streams import AnyFile, Tick, checked_chunks, in_threads
from yatt.core.attempts.checkpoint_names import adoption_name
from yatt.core.attempts.claims import Commit
from yatt.errors import CheckpointError, ConfigError


def copy_to_store(checkpoints: Checkpoints, name: str, target: Store, url: str, tick: Tick) -> bool:
    """Copies the checkpoint of this manifest.

    Args:
        url: of the target, for messages.

    Returns:
        Whether the target did not have it before.

    Raises:
        CheckpointError: a file is damaged, in the source or on its way.
        ConfigError: the target belongs to another run.
    """
    manifest = checkpoints.read(name)
    run_id = manifest.run_id or store_owner(checkpoints.store)
    if not run_id:
        raise ConfigError(f"{name}: its store has no run_id; write the run's id to this name in the store.")
    claim_store(target, url, run_id)
    there = Checkpoints(target, manifest.attempt, manifest.run_id)
    if target.size(name) is not None:
        return _is_there(there, name, manifest, url)
    written: list[str] = []
    try:
        in_threads(files_of(manifest), partial(_copy_file, checkpoints.store, target, written), tick)
        record = adoption_record(Commit(*manifest.parent))
        if not target.create(adoption_name(manifest.attempt), record):
            raise CheckpointError(f"{url} has another record of what attempt {manifest.attempt} resumed from")
        there.commit(manifest)
    except BaseException:
        if target.size(name) is None:
            _remove(target, manifest, written)
        raise
    return True


def _is_there(there: Checkpoints, name: str, manifest: Manifest, url: str) -> bool:
    if sealed_manifest(there.whole(name)) != sealed_manifest(manifest):
        raise ConfigError(f"{url} has another checkpoint under the name {name}; write another URL.")
    return False


def _remove(target: Store, manifest: Manifest, written: list[str]) -> None:
    """Removes what a copy has written, and the save's folder if it is empty then."""
    for path in written:
        target.delete(path)
    for folder in {file.path.rpartition("/")[0] for file in files_of(manifest)}:
        target.delete_empty_folder(folder)


def _copy_file(source: Store, target: Store, written: list[str], file: AnyFile, tick: Tick) -> None:
    found = target.write_stream(file.path, lambda: checked_chunks(source, file, tick))
    written.append(file.path)
    if (found.size_bytes, found.checksum) != (file.size_bytes, file.checksum):
        raise CheckpointError(f"{file.path}: what was written is not what was read; run the command again")
