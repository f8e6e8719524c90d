"""The list of a checkpoint's files, and the one write that commits it. No torch.

Layout under the checkpoint URL::

    global_step_N/ATTEMPT-NONCE/rank-*.safetensors   one attempt's shards: no two attempts share a prefix
    global_step_N/ATTEMPT-NONCE/node-*.groups        prompt groups of its nodes (`control.rollouts.carried`)
    manifests/0000000N.ATTEMPT.json                  written last, conditionally: this is the commit
    adopted/ATTEMPT.json                             the commit that a start resumed from, written first
    run_id                                         the run of this store (`yatt.checkpoint.ownership`)
    holders/NUMBER.FOLDERID.json                   the folder of the run that holds it
    started_from                                   the manifest of another run that this one started from
    latest_checkpointed_iteration.txt              a hint for other people's scripts, after the commit

A checkpoint exists iff its manifest exists, every file in it has its size, and it is on the lineage of the
newest start (`yatt.core.claims`): every reader refuses commits of a stale attempt after another start has
resumed. Resume lists manifests, newest first, and reports why one was skipped; it never reads the hint.
"""

import contextlib
import hashlib
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from yatt.checkpoint.holders import check_held
from yatt.checkpoint.store import Store
from yatt.core.claims import BEGINNING, Commit, lineage, refused
from yatt.errors import CheckpointError, StoreUnreachable
from yatt.records.cluster import StateFile
from yatt.records.message import ShardFile

SCHEMA_VERSION = 5
MANIFESTS, ADOPTED, STARTED_FROM = "manifests", "adopted", "started_from"
LATEST_HINT = "latest_checkpointed_iteration.txt"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One committed checkpoint. `common` is JSON, the trainer's scalars; `nodes` are the files of the trainer
    nodes' controllers, by node; `row` is the iteration's row of metrics, which is completed after resume. In
    `row` and `unwritten`, numbers that are not finite have names (`yatt.obs.metrics.named`).

    `parent` is the (iteration, attempt) of the checkpoint that its start resumed from. `seal` is the SHA-256
    of the manifest, encoded with an empty seal.
    """

    schema_version: int = SCHEMA_VERSION
    seal: str = ""
    iteration: int
    attempt: int
    parent: tuple[int, int] = (0, 0)
    run_id: str = ""
    config_hash: str
    files: tuple[ShardFile, ...]
    common: msgspec.Raw
    nodes: tuple[StateFile, ...]
    row: dict[str, Any] = msgspec.field(default_factory=dict)
    unwritten: tuple[dict[str, Any], ...] = ()
    """Rows of earlier iterations that were not in the metrics file yet."""


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


class _Version(msgspec.Struct, frozen=True):
    """The part of a manifest that all versions have."""

    schema_version: int


class _Adoption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The commit that a start resumed from."""

    iteration: int
    attempt: int


@dataclass(slots=True)
class Leftovers:
    """Files of deleted checkpoints that may still exist, as this process knows (`checkpoint.retention`)."""

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
        return f"global_step_{iteration}/{self.attempt:06d}-{secrets.token_hex(4)}"

    def commit(self, manifest: Manifest) -> None:
        """Commits the checkpoint.

        Raises:
            CheckpointError: a file is missing or has another size, or another attempt has this iteration.
            StoreTakenOver: another folder holds the store now.
        """
        if self._folder_id:
            check_held(self.store, self._folder_id, self._run_id)
        reason = self.fault(manifest)
        if reason:
            raise CheckpointError(f"checkpoint {manifest.iteration} is not committed: {reason}")
        name = name_of(Commit(manifest.iteration, manifest.attempt))
        if not self.store.create(name, sealed(manifest)):
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
            tuple(name_of(commit) for commit in lineage(commits, adopted)),
            tuple(name_of(commit) for commit in refused(commits, adopted)),
        )

    def whole(self, name: str) -> Manifest:
        """Returns a manifest whose files exist with their sizes.

        Raises:
            CheckpointError: as `read`, or a file is missing or has another size.
        """
        manifest = self.read(name)
        if reason := self.fault(manifest):
            raise CheckpointError(f"{name}: {reason}")
        return manifest

    def adopt(self, manifest: Manifest | None) -> None:
        """Records the commit that this start resumes from; then only its own and older commits are valid.

        Raises:
            CheckpointError: this start has recorded another one before.
        """
        commit = Commit(manifest.iteration, manifest.attempt) if manifest else BEGINNING
        if not self.store.create(f"{ADOPTED}/{self.attempt:06d}.json", adoption(commit)):
            raise CheckpointError(f"attempt {self.attempt} went on from another checkpoint before")
        self.parent = (commit.iteration, commit.attempt)

    def read(self, name: str) -> Manifest:
        """Reads one manifest.

        Raises:
            CheckpointError: it is missing, differs from its seal or its name, or has an unknown version.
        """
        manifest = read_manifest(self.store.read(name), name, self._run_id)
        if name_of(Commit(manifest.iteration, manifest.attempt)) != name:
            raise CheckpointError(
                f"{name}: holds iteration {manifest.iteration} of attempt {manifest.attempt}, unlike its name"
            )
        return manifest

    def name(self, manifest: Manifest) -> str:
        """Returns the manifest's name in the store."""
        return name_of(Commit(manifest.iteration, manifest.attempt))

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
        commits = self.commits()
        notes = (name.removesuffix(".json") for name in self.store.names(ADOPTED))
        return max(
            (*(commit.attempt for commit in commits), *(int(n) for n in notes if n.isdigit())), default=0
        )

    def iterations(self) -> set[int]:
        """Returns the iterations that have a folder in the store."""
        parts = (name.rpartition("_") for name in self.store.names(""))
        return {int(number) for stem, _, number in parts if stem == "global_step" and number.isdigit()}

    def saves(self, iteration: int = 0) -> Iterator[tuple[Commit, str]]:
        """Yields the folders of saves, also of unfinished ones, of one iteration or (0) of all."""
        for number in sorted({iteration} if iteration else self.iterations()):
            folder = f"global_step_{number}"
            for name in self.store.names(folder):
                if (attempt := name.partition("-")[0]).isdigit():  # else it is not ours
                    yield Commit(number, int(attempt)), f"{folder}/{name}"

    def commits(self) -> set[Commit]:
        """Returns all commits, also those of stale attempts, by the manifests' names alone."""
        found = set()
        for name in self.store.names(MANIFESTS):
            iteration, _, attempt = name.removesuffix(".json").partition(".")
            if iteration.isdigit() and attempt.isdigit():
                found.add(Commit(int(iteration), int(attempt)))
        return found

    def adopted(self, commits: set[Commit]) -> dict[int, Commit]:
        """Maps each start's attempt to the commit that it resumed from.

        If a record is damaged, the manifests of that start have the commit too. If there are none, the start
        wrote no checkpoint and is ignored.
        """
        found: dict[int, Commit] = {}
        for name in self.store.names(ADOPTED):
            number = name.removesuffix(".json")
            if not number.isdigit():
                continue
            attempt = int(number)
            commit = self._noted(name) or self._parent_of(attempt, commits)
            if commit is not None and commit.attempt < attempt:
                found[attempt] = commit
        return found

    def _noted(self, name: str) -> Commit | None:
        try:
            note = msgspec.json.decode(self.store.read(f"{ADOPTED}/{name}"), type=_Adoption)
        except (msgspec.DecodeError, UnicodeDecodeError, CheckpointError):
            return None
        return Commit(note.iteration, note.attempt)

    def _parent_of(self, attempt: int, commits: set[Commit]) -> Commit | None:
        for commit in sorted(commits):
            if commit.attempt == attempt:
                with contextlib.suppress(CheckpointError):
                    return Commit(*self.read(name_of(commit)).parent)
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


def read_manifest(data: bytes, where: str, run_id: str) -> Manifest:
    """Decodes a sealed manifest.

    Args:
        where: the place that it is from, for messages.
        run_id: of the run that it must be of; empty: of any.

    Raises:
        CheckpointError: it is not whole, differs from its seal, or has an unknown version.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            age = "an older" if version < SCHEMA_VERSION else "a newer"
            raise CheckpointError(
                f"{where}: has format {version}, and this yatt reads format {SCHEMA_VERSION} only; {age} "
                "yatt wrote it, which can go on with it"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where}: not a whole manifest ({error})") from error
    if data != sealed(manifest):
        raise CheckpointError(f"{where}: its content is not what was sealed")
    if run_id and manifest.run_id != run_id:
        raise CheckpointError(f"{where}: is of run {manifest.run_id}; this run is {run_id}")
    return manifest


def weights_commit(manifest: Manifest) -> Commit:
    """Returns the first commit of these weights: the parent's, if a start that restored a local commit has
    only uploaded it."""
    parent = Commit(*manifest.parent)
    own = Commit(manifest.iteration, manifest.attempt)
    return parent if parent.iteration == own.iteration else own


def name_of(commit: Commit) -> str:
    """Returns the name of a commit's manifest in the store."""
    return f"{MANIFESTS}/{commit.iteration:08d}.{commit.attempt:06d}.json"


def commit_of(name: str) -> Commit:
    """Returns the commit of a manifest's name.

    Raises:
        CheckpointError: it is not a name of a manifest.
    """
    iteration, _, attempt = name.rpartition("/")[2].removesuffix(".json").partition(".")
    if not (iteration.isdigit() and attempt.isdigit()):
        raise CheckpointError(f"{name} is not a name of a manifest")
    return Commit(int(iteration), int(attempt))


def prefix_of(manifest: Manifest) -> str:
    """Returns the folder of a save; empty if it has no files."""
    return manifest.files[0].path.rpartition("/")[0] if manifest.files else ""


def adoption(commit: Commit) -> bytes:
    """Returns the record that a start resumed from this commit."""
    return msgspec.json.encode(_Adoption(commit.iteration, commit.attempt))


def sealed(manifest: Manifest) -> bytes:
    """Returns the manifest's bytes, with its seal."""
    plain = msgspec.structs.replace(manifest, seal="")
    digest = hashlib.sha256(msgspec.json.encode(plain)).hexdigest()
    return msgspec.json.encode(msgspec.structs.replace(plain, seal=digest))
