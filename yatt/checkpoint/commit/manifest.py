"""The committed checkpoints of a run, and the one write that commits one. No torch.

Layout under the checkpoint URL::

    global_step_N/ATTEMPT-NONCE/rank-*.safetensors   one attempt's shards: no two attempts share a prefix
    global_step_N/ATTEMPT-NONCE/node-*.groups        prompt groups of its nodes
    (`control.rollouts.groups.carried`) manifests/0000000N.ATTEMPT.json
    `yatt.checkpoint.commit.manifest_format`; written last,
                                                     conditionally: this is the commit
    adopted/ATTEMPT.json                             the commit that a start resumed from, written first
    run_id                                         the run of this store (`yatt.checkpoint.commit.ownership`)
    holders/NUMBER.FOLDERID.json                   the folder of the run that holds it
    started_from                                   the manifest of another run that this one started from
    latest_checkpointed_iteration.txt              a hint for other people's scripts, after the commit

A checkpoint exists iff its manifest exists, every file in it has its size, and it is on the lineage of the
newest start (`yatt.core.attempts.claims`): every reader refuses commits of a stale attempt after another
start has resumed. Resume lists manifests, newest first, and reports why one was skipped; it never reads the
hint. Names of another form are ignored (`yatt.core.attempts.checkpoint_names`).
"""

import contextlib
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from yatt.checkpoint.commit.holders import check_held
from yatt.checkpoint.commit.manifest_format import (
    MOST_MANIFEST_BYTES,
    Manifest,
    commit_of,
    manifest_fault,
    read_manifest,
    sealed_manifest,
)
from yatt.checkpoint.store.store import Store
from yatt.core.attempts.checkpoint_names import (
    ADOPTED,
    MANIFESTS,
    adoption_attempt,
    adoption_name,
    manifest_commit,
    manifest_name,
    save_folder,
    saved_commit,
    step_folder,
    step_iteration,
)
from yatt.core.attempts.claims import BEGINNING, Commit, refused_commits, valid_commits
from yatt.errors import CheckpointError, StoreUnreachable
from yatt.records.message import ShardFile
from yatt.records.shards import Count, StateFile

STARTED_FROM = "started_from"
LATEST_HINT = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint to resume from, if any; reasons for skipped newer ones; commits of stale attempts."""

    manifest: Manifest | None
    name: str
    skipped: tuple[str, ...]
    stale: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidates:
    """Names of the valid manifests, newest first; and of those of stale attempts."""

    names: tuple[str, ...]
    stale: tuple[str, ...]

    def of_iteration(self, iteration: int) -> tuple[str, ...]:
        """Returns the names of this iteration; all for 0."""
        prefix = f"{MANIFESTS}/{iteration:08d}."
        return tuple(name for name in self.names if not iteration or name.startswith(prefix))


class _Adoption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The commit that a start resumed from."""

    iteration: Count
    attempt: Count


@dataclass(slots=True)
class Leftovers:
    """Files of deleted checkpoints that may still exist, as this process knows
    (`checkpoint.commit.retention`)."""

    is_searched: bool = False
    """Whether files of earlier attempts were looked for; they write no more, so once is enough."""

    commits: set[Commit] = field(default_factory=set)
    """Commits whose manifest is deleted, and some files perhaps not."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by a retention: the next commit may come before a slow store has deleted the files of the last."""


class Checkpoints:
    """The committed checkpoints of one run.

    Args:
        attempt: number of this attempt; 0 only reads.
        run_id: manifests of any other run are refused; empty reads any run's.
        folder_id: commits fail if another folder holds the store; empty: no check.
    """

    def __init__(self, store: Store, attempt: int, run_id: str = "", folder_id: str = "") -> None:
        self.store, self.attempt, self._run_id, self._folder_id = store, attempt, run_id, folder_id
        self.leftovers = Leftovers()
        self.parent = (0, 0)
        """(iteration, attempt) of the commit that this start adopted."""

    def prefix(self, iteration: int) -> str:
        """Returns a new folder for one save: only this attempt and this try use it."""
        return save_folder(Commit(iteration, self.attempt), secrets.token_hex(4))

    def commit(self, manifest: Manifest) -> None:
        """Commits the checkpoint.

        Raises:
            CheckpointError: a file is missing or has another size, or another attempt has this iteration.
            StoreTakenOver: another folder holds the store now.
        """
        if self._folder_id:
            check_held(self.store, self._folder_id, self._run_id)
        reason = manifest_fault(manifest) or self.fault(manifest)
        if reason:
            raise CheckpointError(f"checkpoint {manifest.iteration} is not committed: {reason}")
        if not self.store.create(self.name(manifest), sealed_manifest(manifest)):
            raise CheckpointError(
                f"checkpoint {manifest.iteration} was committed already, with other content"
            )
        with contextlib.suppress(OSError, StoreUnreachable):  # the checkpoint exists without it
            self.store.write(LATEST_HINT, f"{manifest.iteration}\n".encode())

    def discard(self, prefix: str) -> None:
        """Removes the files of a save that was not committed."""
        self.store.delete_folder(prefix)

    def newest(self) -> ResumePoint:
        """Returns the newest valid checkpoint whose files exist."""
        candidates = self.candidates()
        skipped: list[str] = []
        for name in candidates.names:
            try:
                return ResumePoint(self.whole(name), name, tuple(skipped), candidates.stale)
            except CheckpointError as error:
                skipped.append(str(error))
        return ResumePoint(None, "", tuple(skipped), candidates.stale)

    def candidates(self) -> Candidates:
        """Returns everything that can be resumed from, by names and adoptions alone."""
        commits = self.commits()  # read first, so that a stale attempt's commit always has its refusal
        adopted = self.adopted(commits)
        return Candidates(
            tuple(manifest_name(commit) for commit in valid_commits(commits, adopted)),
            tuple(manifest_name(commit) for commit in refused_commits(commits, adopted)),
        )

    def whole(self, name: str) -> Manifest:
        """Returns a manifest whose files exist with their sizes.

        Raises:
            CheckpointError: as `read`, or a file is missing or has another size.
        """
        manifest = self.read(name)
        if reason := self.fault(manifest):
            raise CheckpointError(reason, of=name)
        return manifest

    def adopt(self, manifest: Manifest | None) -> None:
        """Records the commit that this start resumes from; then only its own and older commits are valid.

        Raises:
            CheckpointError: this start has recorded another one before.
        """
        commit = commit_of(manifest) if manifest else BEGINNING
        if not self.store.create(adoption_name(self.attempt), adoption_record(commit)):
            raise CheckpointError(f"attempt {self.attempt} went on from another checkpoint before")
        self.parent = (commit.iteration, commit.attempt)

    def read(self, name: str) -> Manifest:
        """Reads one manifest.

        Raises:
            CheckpointError: it is missing, differs from its seal or its name, or has an unknown version.
        """
        data = self.store.read(name, most_bytes=MOST_MANIFEST_BYTES)
        manifest = read_manifest(data, name, self._run_id)
        if self.name(manifest) != name:
            says = f"holds iteration {manifest.iteration} of attempt {manifest.attempt}, unlike its name"
            raise CheckpointError(says, of=name)
        return manifest

    def name(self, manifest: Manifest) -> str:
        """Returns the manifest's name in the store."""
        return manifest_name(commit_of(manifest))

    def origin(self) -> str:
        """Returns the manifest, in another run's store, that this run started from; empty if from none."""
        try:
            return self.store.read(STARTED_FROM).decode(errors="replace").strip()
        except CheckpointError:
            return ""

    def note_origin(self, name: str) -> None:
        """Records the checkpoint from which this run started.

        Raises:
            CheckpointError: another attempt started from a different one.
        """
        if not self.store.create(STARTED_FROM, f"{name}\n".encode()):
            raise CheckpointError(
                f"{STARTED_FROM} holds another name than {name}: two attempts started at once"
            )

    def newest_attempt(self) -> int:
        """Returns the highest attempt with a commit or an adoption; 0 if there is none."""
        return max((*(commit.attempt for commit in self.commits()), *self._adoptions()), default=0)

    def iterations(self) -> set[int]:
        """Returns the iterations that have a folder in the store."""
        found = map(step_iteration, self.store.names(""))
        return {iteration for iteration in found if iteration is not None}

    def saves(self, iteration: int = 0) -> Iterator[tuple[Commit, str]]:
        """Yields the folders of saves, also of unfinished ones, of one iteration or (0) of all. What a linked
        folder leads to is not ours."""
        for number in sorted({iteration} if iteration else self.iterations()):
            names = list[str]()
            with contextlib.suppress(CheckpointError):
                names = self.store.names(step_folder(number))
            for name in names:
                folder = f"{step_folder(number)}/{name}"
                if (commit := saved_commit(folder)) is not None:  # else it is not ours
                    yield commit, folder

    def commits(self) -> set[Commit]:
        """Returns all commits, also those of stale attempts, by the manifests' names alone."""
        found = (manifest_commit(f"{MANIFESTS}/{name}") for name in self.store.names(MANIFESTS))
        return {commit for commit in found if commit is not None}

    def adopted(self, commits: set[Commit]) -> dict[int, Commit]:
        """Maps each start's attempt to the commit that it resumed from.

        If a record is damaged, the manifests of that start have the commit too. If there are none, the start
        wrote no checkpoint and is ignored.
        """
        found: dict[int, Commit] = {}
        for attempt in self._adoptions():
            commit = self._noted(attempt) or self._parent_of(attempt, commits)
            if commit is not None and commit.attempt < attempt:
                found[attempt] = commit
        return found

    def _adoptions(self) -> list[int]:
        found = (adoption_attempt(f"{ADOPTED}/{name}") for name in self.store.names(ADOPTED))
        return [attempt for attempt in found if attempt is not None]

    def _noted(self, attempt: int) -> Commit | None:
        try:
            note = msgspec.json.decode(self.store.read(adoption_name(attempt)), type=_Adoption)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, CheckpointError):
            return None
        return Commit(note.iteration, note.attempt)

    def _parent_of(self, attempt: int, commits: set[Commit]) -> Commit | None:
        for commit in sorted(commits):
            if commit.attempt == attempt:
                with contextlib.suppress(CheckpointError):
                    return Commit(*self.read(manifest_name(commit)).parent)
        return None

    def fault(self, manifest: Manifest) -> str:
        """Returns which file is missing or has another size; empty if all are there."""
        files: list[ShardFile | StateFile] = [*manifest.files, *manifest.nodes]
        for file in files:
            size = self.store.size(file.path)
            if size != file.size_bytes:
                there = "is missing" if size is None else f"has {size} bytes instead of {file.size_bytes}"
                return f"{file.path} {there}"
        return ""


def adoption_record(commit: Commit) -> bytes:
    """Returns the record that a start resumed from this commit."""
    return msgspec.json.encode(_Adoption(commit.iteration, commit.attempt))
