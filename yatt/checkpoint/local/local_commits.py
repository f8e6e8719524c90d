"""Local commits: records in the run folder of saves whose files are only on the trainer nodes' disks.

    RUN/local_commits/0000000N.ATTEMPT.json

A record has the manifest that a commit in the store would have, and the hosts of the trainer nodes. It is
created once, and fenced like manifests: a local commit is valid if it is on the lineage of all commits, in
the store and local (`yatt.core.attempts.claims`). A start that resumes from it adopts it, and uploads it as
its first save. No torch.
"""

import contextlib
from pathlib import Path

import msgspec

from yatt.adapters.files.files import create_exclusively, make_within, read_record
from yatt.adapters.files.patience import is_passing
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest, read_manifest, sealed_manifest
from yatt.core.attempts.checkpoint_names import MANIFESTS, manifest_commit, manifest_name
from yatt.core.attempts.claims import Commit, valid_commits
from yatt.errors import CheckpointError, words_of
from yatt.paths import RunPaths


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a record: the sealed manifest, and the host of each trainer node at the time of the save."""

    manifest: msgspec.Raw
    hosts: tuple[str, ...]


class LocalCommits:
    """The local commits of a run.

    Args:
        run_id: records of another run are refused.
    """

    def __init__(self, paths: RunPaths, run_id: str) -> None:
        self._paths, self._run_id = paths, run_id

    def commit(self, manifest: Manifest, hosts: tuple[str, ...]) -> None:
        """Creates the record of a save whose files are on all nodes.

        Raises:
            CheckpointError: there is another record of this iteration and attempt.
            OSError: the run folder fails.
        """
        path = self._path(Commit(manifest.iteration, manifest.attempt))
        make_within(self._paths.root, path.parent)
        data = msgspec.json.encode(_Record(msgspec.Raw(sealed_manifest(manifest)), hosts))
        if not create_exclusively(path, data) and read_record(path) != data:
            raise CheckpointError(f"{path} holds another save of this iteration")

    def read(self, commit: Commit) -> tuple[Manifest, tuple[str, ...]]:
        """Returns the manifest and the hosts of a record.

        Raises:
            CheckpointError: it is missing, damaged, of another run, or cannot be read.
            OSError: a passing error.
        """
        path = self._path(commit)
        try:
            record = msgspec.json.decode(read_record(path), type=_Record)
        except OSError as error:
            if is_passing(error):
                raise
            raise CheckpointError(f"{path} cannot be read: {words_of(error)}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a whole record of a local commit ({error})") from error
        manifest = read_manifest(bytes(record.manifest), str(path), self._run_id)
        if (manifest.iteration, manifest.attempt) != (commit.iteration, commit.attempt):
            raise CheckpointError(f"{path}: holds another commit than its name says")
        return manifest, record.hosts

    def newer(self, checkpoints: Checkpoints) -> list[Commit]:
        """Returns the valid local commits that are newer than all valid ones in the store, newest first."""
        own = self.commits()
        if not own:
            return []
        stored = checkpoints.commits()  # read first: see `Checkpoints.candidates`
        line = valid_commits(stored | own, checkpoints.adopted(stored | own))
        newest = max((commit.iteration for commit in line if commit in stored), default=0)
        return [commit for commit in line if commit in own and commit.iteration > newest]

    def commits(self) -> set[Commit]:
        """Returns all local commits, by names alone."""
        with contextlib.suppress(FileNotFoundError):
            names = [path.name for path in self._paths.local_commits.iterdir()]
            found = (manifest_commit(f"{MANIFESTS}/{name}") for name in names)
            return {commit for commit in found if commit is not None}
        return set()

    def remove_until(self, iteration: int, attempt: int) -> None:
        """Removes the records up to an iteration that this attempt has committed in the store. Those of newer
        attempts stay: this one may be stale.

        Raises:
            OSError: the run folder fails.
        """
        for commit in self.commits():
            if commit.iteration <= iteration and commit.attempt <= attempt:
                self._path(commit).unlink(missing_ok=True)

    def _path(self, commit: Commit) -> Path:
        return self._paths.local_commits / manifest_name(commit).rpartition("/")[2]
