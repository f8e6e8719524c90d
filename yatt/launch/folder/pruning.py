"""`yatt ckpt prune`: applies the rules of retention to a run that is not active."""

from pathlib import Path

from yatt.adapters.run_folder.ledger import newest_attempt
from yatt.adapters.run_folder.run_config import load_run
from yatt.adapters.slurm.slurm import Slurm
from yatt.checkpoint.commit.holders import check_held
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.ownership import check_owner
from yatt.checkpoint.commit.retention import Removed, Row, apply_retention
from yatt.checkpoint.commit.run_store import check_presence, open_run_store, own_folder_id, store_url
from yatt.checkpoint.store.store import Store
from yatt.checkpoint.store.unfinished import abort_uploads
from yatt.config.schema import RunConfig
from yatt.config.sections.operation import CheckpointSection
from yatt.core.attempts.checkpoint_names import manifest_name
from yatt.core.attempts.claims import Commit
from yatt.errors import AlreadyGoing, CheckpointError, ConfigError, StoreTakenOver
from yatt.launch.folder.known import known_runs
from yatt.launch.folder.occupied import find_occupant
from yatt.obs.metrics import read_metric_rows
from yatt.paths import RunPaths


def prune_stored(
    paths: RunPaths, config: RunConfig, store: Store, policy: CheckpointSection, *, dry_run: bool
) -> Removed:
    """Deletes the checkpoints that the policy does not keep, files of interrupted saves, and their unfinished
    uploads.

    Args:
        policy: usually that of the config.
        dry_run: only decide.

    Raises:
        ConfigError: the run is active, or its store belongs to another run or folder.
        CheckpointsMissing: the store lists no checkpoint, although some were committed.
    """
    url = store_url(config, paths.root)
    _refuse_active(paths)
    check_presence(store, url, paths)
    check_owner(store, url, config.run.id)
    try:
        check_held(store, own_folder_id(paths, store), config.run.id)
    except StoreTakenOver as error:
        raise ConfigError(f"{error} Prune it there.") from error
    attempt = max(newest_attempt(paths), Checkpoints(store, 0).newest_attempt()) + 1
    checkpoints = Checkpoints(store, attempt, config.run.id)
    rows = _rows(checkpoints, paths) if policy.keep_best else []
    removed = apply_retention(
        checkpoints, policy, rows, needed=_needed(checkpoints, url, paths.root), dry_run=dry_run
    )
    if not dry_run:
        abort_uploads(url, config.checkpoint.storage_options, before=attempt)
    return removed


def _refuse_active(paths: RunPaths) -> None:
    if not paths.claims.is_dir() and not paths.job.exists():
        return
    if where := find_occupant(paths, Slurm()).where:
        raise AlreadyGoing(
            f"{where}; it deletes checkpoints itself, after each commit. Nothing was deleted; stop it with "
            f"`yatt cancel {paths.root}` first."
        )


def _rows(checkpoints: Checkpoints, paths: RunPaths) -> list[Row]:
    """Returns rows of metrics: those of the manifests, in case the file is lost, then the file's."""
    found: list[Row] = []
    for commit in checkpoints.commits():
        try:
            found.append(checkpoints.read(manifest_name(commit)).row)
        except CheckpointError:
            continue
    return [*found, *read_metric_rows(paths.metrics)]


def _needed(checkpoints: Checkpoints, url: str, own: Path) -> frozenset[Commit]:
    """Returns commits from which another run of this user's list started, until it has a checkpoint.

    Raises:
        StoreUnreachable: such a run's store does not answer, so that it is unknown.
    """
    found: set[Commit] = set()
    for root in known_runs():
        try:
            config = load_run(RunPaths(root))
        except ConfigError:
            continue
        origin = config.run.from_checkpoint
        if root == own or not origin.url or origin.url.rstrip("/") != url.rstrip("/"):
            continue
        its = Checkpoints(open_run_store(config, root), 0)
        if not its.candidates().names:
            found |= _started_from(checkpoints, its.origin(), origin.iteration)
    return frozenset(found)


def _started_from(checkpoints: Checkpoints, pinned: str, iteration: int) -> set[Commit]:
    """The commits that a run may start from; the newest one, without a wish, stays anyway."""
    commits = checkpoints.commits()
    if pinned:
        return {commit for commit in commits if manifest_name(commit) == pinned}
    return {commit for commit in commits if iteration and commit.iteration == iteration}
