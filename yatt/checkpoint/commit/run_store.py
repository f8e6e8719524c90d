"""The checkpoint store of one run: its URL, its run, and the check that its checkpoints are there. No torch.

A folder that is not mounted looks like an empty folder. The run's ledger distinguishes it from a new store:
without this check a run would start from iteration 0 again without an error.
"""

import re
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

from yatt.adapters.files.files import create_exclusively, read_record
from yatt.adapters.files.patience import with_retries
from yatt.adapters.run_folder.ledger import known_commit, started_attempts
from yatt.checkpoint.commit.holders import Place, check_held, hold_store, holder_of, place_of
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.ownership import claim_store, store_owner
from yatt.checkpoint.store.patient import PatientStore
from yatt.checkpoint.store.store import Store, open_store
from yatt.config.schema import RunConfig
from yatt.errors import CheckpointsMissing
from yatt.paths import RunPaths

FOLDER_ID = re.compile(rb"\s*([0-9a-f]{12})\s*")


def store_url(config: RunConfig, root: Path) -> str:
    """Returns the URL of the run's checkpoints."""
    return config.checkpoint.url or str(root / "checkpoints")


def open_run_store(config: RunConfig, root: Path) -> Store:
    """Opens the run's checkpoint store.

    Raises:
        ConfigError: its URL cannot be used.
    """
    return open_store(store_url(config, root), config.checkpoint.storage_options, config.checkpoint.stall_s)


class Stores:
    """The stores of a run: its own, and the one that it started from. Each is opened when it is needed; calls
    are repeated after temporary failures, up to `launch.phase_timeout_s` each.

    Args:
        say, tick: report waits, as of `PatientStore`; called in any thread that uses the store.
    """

    def __init__(
        self,
        config: RunConfig,
        root: Path,
        say: Callable[[str], None],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._root, self._say, self._tick = config, root, say, tick
        self._opened: dict[bool, Store] = {}

    def of(self, *, is_origin: bool) -> Store:
        """Returns the run's own store, or the one of `run.from_checkpoint`. Blocks.

        Raises:
            ConfigError: its URL cannot be used.
        """
        origin, limit_s = self._config.run.from_checkpoint, self._config.launch.phase_timeout_s
        stall_s = self._config.checkpoint.stall_s
        opening = partial(open_run_store, self._config, self._root)
        if is_origin:
            opening = partial(open_store, origin.url, origin.storage_options, stall_s)
        if is_origin not in self._opened:
            opened = with_retries(opening, limit_s=limit_s)
            self._opened[is_origin] = PatientStore(opened, limit_s=limit_s, say=self._say, tick=self._tick)
        return self._opened[is_origin]


def claimed_run_store(config: RunConfig, root: Path, say: Callable[[str], None]) -> Store:
    """Returns the run's checkpoint store, after checking that it is this run's and has its checkpoints.
    Retries calls as `Stores`, for up to `launch.phase_timeout_s` each; `say` reports this.

    Raises:
        ConfigError: it belongs to another run.
        StoreTakenOver: another folder of this run holds it.
        CheckpointsMissing: as `check_presence`; then nothing was written there.
        StoreUnreachable: it does not respond.
    """
    store, url = Stores(config, root, say).of(is_origin=False), store_url(config, root)
    check_presence(store, url, RunPaths(root))
    claim_store(store, url, config.run.id)
    paths, limit_s = RunPaths(root), config.launch.phase_timeout_s
    folder_id = with_retries(partial(own_folder_id, paths, store), limit_s=limit_s)
    hold_store(store, folder_id, Place.here(str(root)), takes_over=False)
    check_held(store, folder_id, config.run.id)
    return store


def take_hold(store: Store, paths: RunPaths, run_id: str) -> Place | None:
    """Records this folder as the store's holder. A folder without attempts takes it over from another folder.

    Returns:
        The folder it was taken from, if any.

    Raises:
        StoreTakenOver: this folder has attempts, and another one holds the store.
        StoreUnreachable: the store does not respond.
    """
    folder_id = own_folder_id(paths, store)
    before = hold_store(store, folder_id, Place.here(str(paths.root)), takes_over=not started_attempts(paths))
    check_held(store, folder_id, run_id)
    return before


def own_folder_id(paths: RunPaths, store: Store) -> str:
    """Returns the run folder's id, which is drawn at its first start. If a folder with attempts has lost its
    id or the id is damaged, it is found in the store by the folder's path. A folder without attempts draws a
    new one: a folder of another machine may have the same path.

    Raises:
        OSError: the run folder cannot be read.
    """
    try:
        if known := _folder_id(paths):
            return known
        paths.folder_id.unlink()
    except FileNotFoundError:
        pass
    holder = holder_of(store)
    is_ours = (
        holder is not None and place_of(store, holder).folder == str(paths.root) and started_attempts(paths)
    )
    fresh = holder.folder_id if holder is not None and is_ours else secrets.token_hex(6)
    create_exclusively(paths.folder_id, f"{fresh}\n".encode())
    return _folder_id(paths)


def _folder_id(paths: RunPaths) -> str:
    """Returns the id in the file; empty if it is not valid."""
    found = FOLDER_ID.fullmatch(read_record(paths.folder_id))
    return found.group(1).decode() if found else ""


def check_presence(store: Store, url: str, paths: RunPaths) -> None:
    """Refuses a store that lists no checkpoint, or is nobody's, if the run's ledger has a commit; changes
    nothing.

    A manifest may be all that a store has: a save was in flight when it was unmounted.

    Raises:
        CheckpointsMissing: the store lists none, or has no owner.
        StoreUnreachable: the store does not respond.
    """
    iteration, attempt = known_commit(paths)
    if not iteration:
        return
    found = Checkpoints(store, 0).candidates()
    has_some = bool(found.names or found.stale)  # the ledger may have a stale attempt's commit too
    if has_some and store_owner(store):
        return
    lacks = "is claimed by no run" if has_some else "holds no checkpoint"
    raise CheckpointsMissing(
        f"the checkpoint store {url} {lacks}, but iteration {iteration} of this run was "
        f"committed ({paths.attempt(attempt)} says so). Is the store mounted here? The run does not start "
        f"again from iteration 0. Bring the store back, then `yatt resume {paths.root}` goes on; to train "
        "from the beginning, start a new run with another run.dir."
    )
