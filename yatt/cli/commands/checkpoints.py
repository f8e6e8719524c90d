"""`yatt ckpt list | verify | export | prune | copy` and `yatt convert`."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from yatt.checkpoint.commit.inventory import StoredCheckpoint, stored_checkpoints
from yatt.checkpoint.commit.ownership import store_owner
from yatt.checkpoint.commit.verifying import Verified, manifest_bytes, verify_checkpoint
from yatt.checkpoint.convert.copying import copy_to_store
from yatt.checkpoint.convert.export import FolderForm, export_as_hf, weight_bytes
from yatt.checkpoint.convert.from_hf import check_new_store, checkpoint_bytes, to_checkpoint
from yatt.checkpoint.convert.hf_folder import check_target
from yatt.checkpoint.store.store import open_store
from yatt.cli.progress import ByteProgress, bytes_in_words
from yatt.cli.sources import (
    Source,
    ages_s,
    all_of,
    chosen_manifest,
    manifest_of,
    model_folder,
    parsed_options,
    patient_store,
    run_source,
    store_source,
)
from yatt.config.schema import ModelSection
from yatt.config.sections.operation import CheckpointSection
from yatt.core.attempts.checkpoint_names import named_commit
from yatt.core.attempts.claims import Commit
from yatt.credentials import redacted_text
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, CheckpointError, ConfigError
from yatt.launch.folder.folder import open_existing
from yatt.launch.folder.pruning import prune_stored
from yatt.launch.resolve.completed import new_id
from yatt.models.folder import ModelFolder
from yatt.obs.story.words import duration_in_words
from yatt.printable import printable

MOST_SHOWN = 100
"""Damaged places of a checkpoint that are printed for people."""

MAIN = "float32"
"""dtype of the main copies in a checkpoint."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def open_source(where: str, *, is_store: bool, options: Sequence[str]) -> Source:
    """Returns the checkpoints of a run folder, or in a store."""
    if options and not is_store:
        raise ConfigError("--option is for a store's URL; a run's own options are in its config.")
    return store_source(where, parsed_options(options)) if is_store else run_source(Path(where))


def list_checkpoints(source: Source, *, as_json: bool) -> int:
    """Prints what the store holds."""
    entries, ages = stored_checkpoints(source.checkpoints), ages_s(source)
    if as_json:
        listed = [asdict(e) | {"age_s": ages.get(Commit(e.iteration, e.attempt))} for e in entries]
        _print(json.dumps({"store": source.shown, "checkpoints": listed}))
        return EXIT_FINISHED
    rows = [("ITERATION", "ATTEMPT", "SIZE", "AGE", "STATE"), *(_row(e, ages) for e in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows if entries else ():
        cells = [cell.rjust(width) for cell, width in zip(row[:4], widths, strict=True)]
        _print("  ".join([*cells, row[4]]))
    if not entries:
        _print(f"{source.shown}: no checkpoints")
    return EXIT_FINISHED


def _row(entry: StoredCheckpoint, ages: dict[Commit, float]) -> tuple[str, ...]:
    age = ages.get(Commit(entry.iteration, entry.attempt))
    state = f"{entry.state}: {entry.fault}" if entry.fault else entry.state
    return (
        str(entry.iteration),
        str(entry.attempt),
        bytes_in_words(entry.size_bytes) if entry.size_bytes else "-",
        "-" if age is None else duration_in_words(age),
        f"{state}, resumed next" if entry.is_next else state,
    )


def verify_checkpoints(source: Source, iteration: int, *, as_json: bool) -> int:
    """Reads all bytes of one iteration's checkpoint, or of all in the lineage."""
    names, found = all_of(source, iteration), []
    progress = ByteProgress("verify", sum(_size_of(source, name) for name in names))
    try:
        for name in names:
            found.append(verify_checkpoint(source.checkpoints, name, progress.tick))
            progress.clear()
            if not as_json:
                _print_verified(found[-1])
    finally:
        progress.clear()
    if as_json:
        listed = [
            asdict(each) | asdict(named_commit(each.name)) | {"is_whole": not each.damages} for each in found
        ]
        _print(json.dumps({"store": source.shown, "checkpoints": listed}))
    return EXIT_FAILED if any(each.damages for each in found) else EXIT_FINISHED


def _size_of(source: Source, name: str) -> int:
    try:
        return manifest_bytes(manifest_of(source, name))
    except CheckpointError:
        return 0


def _print_verified(found: Verified) -> None:
    commit, count = named_commit(found.name), len(found.damages)
    state = f"DAMAGED in {count} place{'s' if count > 1 else ''}" if count else "whole"
    _print(
        f"iteration {commit.iteration} of attempt {commit.attempt}: {state} "
        f"({bytes_in_words(found.size_bytes)})"
    )
    for damage in found.damages[:MOST_SHOWN]:
        _print(f"  {damage}")
    if count > MOST_SHOWN:
        _print(f"  and {count - MOST_SHOWN} more; --json lists all")


def export_checkpoint(
    source: Source, iteration: int, target: Path, model: Path | None, family: Path | None, form: FolderForm
) -> int:
    """Writes a checkpoint's weights, the policy's or the critic's, as a Hugging Face folder."""
    check_target(target)
    name = chosen_manifest(source, iteration)
    folder = model_folder(source, model, family, is_critic=bool(form.prefix))
    manifest = manifest_of(source, name)
    progress = ByteProgress("export", weight_bytes(manifest, form))
    try:
        written = export_as_hf(source.checkpoints, name, folder, target, progress.tick, form)
    finally:
        progress.clear()
    has_more = written != MAIN and any(
        piece.key.startswith(f"{form.prefix}main.") for file in manifest.files for piece in file.tensors
    )
    more = f" (the checkpoint has {MAIN} copies too: --dtype {MAIN})" if has_more else ""
    whose = "the critic's weights" if form.prefix else "the weights"
    _print(f"{target}: {whose} of iteration {named_commit(name).iteration}, in {written}{more}")
    return EXIT_FINISHED


def copy_checkpoint(source: Source, url: str, iteration: int, options: Sequence[str]) -> int:
    """Copies one checkpoint to another store."""
    name = chosen_manifest(source, iteration)
    place = url if "://" in url else str(Path(url).absolute())
    target = patient_store(open_store(place, parsed_options(options)))
    progress = ByteProgress("copy", manifest_bytes(manifest_of(source, name)))
    try:
        is_new = copy_to_store(source.checkpoints, name, target, redacted_text(place), progress.tick)
    finally:
        progress.clear()
    done = "copied" if is_new else "was there already"
    _print(f"{redacted_text(place)}: iteration {named_commit(name).iteration} {done}")
    return EXIT_FINISHED


def prune_checkpoints(run: Path, changes: dict[str, Any], *, dry_run: bool) -> int:
    """Deletes the checkpoints of a run that its config, or these changes of it, do not keep."""
    paths, config = open_existing(run, runs_functions=False)
    try:
        policy: CheckpointSection = replace(config.checkpoint, **changes)
    except ValueError as error:
        raise ConfigError(f"ckpt prune: {error}") from error
    source = run_source(run)
    removed = prune_stored(paths, config, source.checkpoints.store, policy, dry_run=dry_run)
    done = "would delete" if dry_run else "deleted"
    for commit in removed.commits:
        _print(f"{done} iteration {commit.iteration} of attempt {commit.attempt}")
    if removed.note:
        _print(f"note: {removed.note}")
    if not removed.commits:
        _print("no checkpoint to delete")
    return EXIT_FINISHED


def source_of(where: str, options: Sequence[str]) -> Source:
    """Returns the checkpoints of a run folder or a store, whichever it is.

    Raises:
        ConfigError: it is neither.
    """
    folder = Path(where)
    if "://" in where or (folder / "manifests").is_dir():
        return open_source(where, is_store=True, options=options)
    if (folder / "config.json").is_file():
        raise ConfigError(f"{where} is a Hugging Face folder; add --to-checkpoint URL.")
    return open_source(where, is_store=False, options=options)


def convert_folder(folder: Path, url: str, run_id: str, family: Path | None, options: Sequence[str]) -> int:
    """Writes the weights of a Hugging Face folder as a checkpoint."""
    if run_id and not _RUN_ID.fullmatch(run_id):
        raise ConfigError("--run-id may have letters, digits, '-' and '_', at most 64.")
    source = _hugging_face(folder, family)
    place = url if "://" in url else str(Path(url).absolute())
    store = patient_store(open_store(place, parsed_options(options)))
    check_new_store(store, redacted_text(place))
    owner = run_id or store_owner(store) or new_id()  # of an interrupted conversion, or a new one
    progress = ByteProgress("convert", checkpoint_bytes(source))
    try:
        to_checkpoint(source, store, redacted_text(place), owner, progress.tick)
    finally:
        progress.clear()
    _print(f"{redacted_text(place)}: the weights of {folder}, as run {owner}; use run.from_checkpoint.url")
    return EXIT_FINISHED


def _hugging_face(folder: Path, family: Path | None) -> ModelFolder:
    section = ModelSection(path=str(folder.absolute()), family=str(family.absolute()) if family else "")
    from yatt.adapters.inputs.model_family import model_of_run

    return ModelFolder(path=folder, model=model_of_run(section))


def _print(text: str) -> None:
    sys.stdout.write(printable(text) + "\n")
