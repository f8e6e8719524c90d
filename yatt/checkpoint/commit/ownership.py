"""A checkpoint store belongs to one run: the first that creates the name `run_id` in it. No torch.

A run reads and writes a store only after that name has the run's own id. A run is identified by its id, not
by its folder: if the folder is lost, a new folder with the same id takes the run over
(`yatt.checkpoint.commit.holders`).
"""

from yatt.checkpoint.store.store import Store
from yatt.core.attempts.checkpoint_names import MANIFESTS
from yatt.errors import CheckpointError, ConfigError

OWNER = "run_id"
MOST_OWNER_BYTES = 1024


def store_owner(store: Store) -> str:
    """Returns the id of the run that the store belongs to; empty if it belongs to none.

    Raises:
        CheckpointError: there is something else under the name `run_id`.
        StoreUnreachable: the store does not respond.
    """
    try:
        return _noted_owner(store)
    except CheckpointError:
        if store.size(OWNER) is None:
            return ""
    return _noted_owner(store)  # created meanwhile, or no such file


def _noted_owner(store: Store) -> str:
    return store.read(OWNER, most_bytes=MOST_OWNER_BYTES).decode(errors="replace").strip()


def check_owner(store: Store, url: str, run_id: str) -> None:
    """Refuses a store of another run; changes nothing.

    Raises:
        ConfigError: the store belongs to another run, or has checkpoints of an unknown one.
        StoreUnreachable: the store does not respond.
    """
    owner = store_owner(store)
    if not owner and store.names(MANIFESTS):
        raise ConfigError(
            f"checkpoint.url: {url} holds checkpoints that no run has claimed. Name an empty place, or, if "
            f"they are this run's, write its id to {url}/{OWNER}."
        )
    if owner not in ("", run_id):
        raise ConfigError(
            f"checkpoint.url: {url} belongs to run {owner}; this run is {run_id}. Name another place. To go "
            f"on with run {owner} because its folder is gone, write run.id: {owner}; a run that goes on in "
            f"another folder all the same ends at its next checkpoint. To start a new run from "
            f"its weights or whole state, write run.from_checkpoint.url: {url} and another checkpoint.url."
        )


def claim_store(store: Store, url: str, run_id: str) -> None:
    """Records the store as this run's, if it is not yet.

    Raises:
        ConfigError: as `check_owner`.
        StoreUnreachable: the store does not respond.
    """
    check_owner(store, url, run_id)
    if not store.create(OWNER, f"{run_id}\n".encode()):  # another run was faster
        check_owner(store, url, run_id)
