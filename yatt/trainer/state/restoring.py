"""What a trainer rank restores from: the run's store, another run's, or local files. No torch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from yatt.adapters.files.patience import with_retries
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest, saved_scalars
from yatt.checkpoint.commit.ownership import store_owner
from yatt.checkpoint.local.local_commits import LocalCommits
from yatt.checkpoint.local.local_first import LocalFirst, Ranges
from yatt.checkpoint.local.local_store import LocalStore
from yatt.checkpoint.local.local_tier import LocalTier
from yatt.checkpoint.store.patient import PatientStore
from yatt.checkpoint.store.store import Store, open_store
from yatt.config.schema import RunConfig
from yatt.core.attempts.checkpoint_names import named_commit
from yatt.errors import CheckpointError, ConfigError, StoreUnreachable
from yatt.paths import RunPaths
from yatt.records import message as m


class CheckpointSource:
    """Opens what an order to restore names.

    Args:
        store: the run's checkpoint store.
        tick: called while a store is waited for.
        say: called about such waits, as in `PatientStore`.
    """

    def __init__(
        self, config: RunConfig, store: Store, *, tick: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._config, self._store, self._tick, self._say = config, store, tick, say

    def restored(self, order: m.Restore, fill: Callable[[Ranges, Manifest], None]) -> m.Restored:
        """Restores a checkpoint. A damaged one is reported in the answer, and the leader tries an older one.

        Args:
            fill: restores the rank from these ranges and this manifest.

        Raises:
            ConfigError: a run with another `model.trainer` saved it.
            StoreUnreachable: the store has no `run_id` on this node either, so it is not mounted here.
        """
        store = self._origin() if order.is_origin else self._store
        local: LocalFirst | LocalStore | None = None
        try:
            opened = partial(LocalTier.of, self._config)
            if order.is_local:
                manifest, local = self._local_commit(order.checkpoint), LocalStore(opened)
            else:
                manifest = Checkpoints(store, attempt=0).read(order.checkpoint)
                if self._config.checkpoint.local_dir and not order.is_origin:
                    local = LocalFirst(store, opened, manifest.files)
            self._check_trainer(manifest)
            fill(local or store, manifest)
        except CheckpointError as error:
            if not (order.is_local or store_owner(store)):
                raise StoreUnreachable(
                    f"{error}; this node sees no run_id in the checkpoint store either: is it mounted here?"
                ) from error
            return m.Restored(fault=str(error))
        return m.Restored(local_bytes=local.local_bytes if local is not None else 0)

    def _check_trainer(self, manifest: Manifest) -> None:
        saved, wanted = saved_scalars(manifest).trainer, self._config.model.trainer
        if saved != wanted:
            raise ConfigError(
                f"checkpoint {manifest.iteration} is of a run with model.trainer: {saved}, and this run has "
                f"model.trainer: {wanted}. The weights of a scripted trainer are no model's; name another "
                "checkpoint."
            )

    def _local_commit(self, name: str) -> Manifest:
        """Reads the record of a local commit from the run folder."""
        commits = LocalCommits(RunPaths(Path(self._config.run.dir)), self._config.run.id)
        return with_retries(partial(commits.read, named_commit(name)))[0]

    def _origin(self) -> Store:
        """The store of the run from which this run starts."""
        origin = self._config.run.from_checkpoint
        stall_s = self._config.checkpoint.stall_s
        opened = with_retries(partial(open_store, origin.url, origin.storage_options, stall_s))
        limit_s = self._config.launch.phase_timeout_s
        return PatientStore(opened, limit_s=limit_s, tick=self._tick, say=self._say)
