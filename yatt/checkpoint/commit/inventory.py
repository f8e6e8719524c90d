"""Lists what a checkpoint store holds: commits, stale commits, files without a manifest. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.verifying import manifest_bytes
from yatt.core.attempts.checkpoint_names import manifest_name
from yatt.core.attempts.claims import Commit, refused_commits, valid_commits
from yatt.errors import CheckpointError

WHOLE, DAMAGED, STALE, UNFINISHED = "whole", "damaged", "stale", "unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """One checkpoint, or the files of a save that has no manifest.

    Args:
        name: of the manifest, or of the folder without one.
        size_bytes: as the manifest says; 0 if unknown.
        state: whole and damaged ones are in the lineage. Whole: all files are there with their sizes; only
            `verify` reads them. Stale: of a stale attempt. Unfinished: a save in flight, or interrupted.
        fault: why it is damaged.
        is_next: a resumed run would take it.
    """

    iteration: int
    attempt: int
    name: str
    size_bytes: int = 0
    state: str
    fault: str = ""
    is_next: bool = False


def stored_checkpoints(checkpoints: Checkpoints) -> list[StoredCheckpoint]:
    """Returns everything in the store, newest iteration first.

    Raises:
        StoreUnreachable: the store does not answer.
    """
    commits = checkpoints.commits()
    adopted = checkpoints.adopted(commits)
    found, has_next = [], False
    for commit in valid_commits(commits, adopted):
        entry = _entry(checkpoints, commit, is_next=not has_next)
        has_next = has_next or entry.is_next
        found.append(entry)
    for commit in refused_commits(commits, adopted):
        found.append(replace(_entry(checkpoints, commit, is_next=False), state=STALE))
    if any(entry.fault for entry in found):  # retention may have deleted some of them meanwhile
        there = checkpoints.commits()
        found = [each for each in found if not each.fault or Commit(each.iteration, each.attempt) in there]
    found += _unfinished(checkpoints, commits)
    return sorted(found, key=lambda entry: (entry.iteration, entry.attempt), reverse=True)


def _entry(checkpoints: Checkpoints, commit: Commit, *, is_next: bool) -> StoredCheckpoint:
    name, size_bytes, fault = manifest_name(commit), 0, ""
    try:
        manifest = checkpoints.read(name)
        size_bytes, fault = manifest_bytes(manifest), checkpoints.fault(manifest)
    except CheckpointError as error:
        fault = error.says
    return StoredCheckpoint(
        iteration=commit.iteration,
        attempt=commit.attempt,
        name=name,
        size_bytes=size_bytes,
        state=DAMAGED if fault else WHOLE,
        fault=fault,
        is_next=is_next and not fault,
    )


def _unfinished(checkpoints: Checkpoints, commits: set[Commit]) -> Iterator[StoredCheckpoint]:
    for commit, name in checkpoints.saves():
        if commit not in commits:
            yield StoredCheckpoint(
                iteration=commit.iteration, attempt=commit.attempt, name=name, state=UNFINISHED
            )
