"""How far a run is saved, asked by its launcher between attempts, also while the checkpoint store is down.

A launcher that gave up over a store that is down for a minute would end the run. It waits instead, as long as
for a phase of the run, and no attempt is started and fails meanwhile.
"""

from collections.abc import Callable
from pathlib import Path

from yatt.adapters.patience import until_answered
from yatt.checkpoint.file_faults import FileFaults
from yatt.checkpoint.manifest import Checkpoints
from yatt.checkpoint.ownership import owner_of
from yatt.checkpoint.run_store import check_presence, open_run_store, store_url
from yatt.config.schema import RunConfig
from yatt.errors import CheckpointsMissing, StoreUnreachable
from yatt.launch.folder import take_over
from yatt.paths import RunPaths

ANSWER_S = 10.0
"""How long a launcher that is about to end waits for the store, which it needs for messages only."""

_ERRORS = (StoreUnreachable, OSError)


def committed_if_known(config: RunConfig, root: Path, *, otherwise: int) -> int:
    """The newest committed iteration, 0 if there is none; `otherwise` if the store does not answer soon."""
    try:
        found = until_answered(lambda: _committed(config, root), errors=_ERRORS, limit_s=ANSWER_S)
    except _ERRORS:
        found = None
    return otherwise if found is None else found


def await_committed(
    config: RunConfig,
    root: Path,
    *,
    is_told: Callable[[], bool],
    say: Callable[[str], None],
    begins: bool = False,
) -> int | None:
    """The newest committed iteration, 0 if there is none, however long the store is down, within limits.

    Args:
        begins: before the folder's first attempt: the store is made this folder's.
        is_told: whether the launcher has to end; the wait ends then, with None.
        say: prints one line for people.

    Raises:
        StoreUnreachable: no answer within `launch.phase_timeout_s`.
        CheckpointsMissing: it answers, and the checkpoints that the ledger knows of are not in it.
        StoreTakenOver: another folder has taken it over.
    """
    url, limit_s = store_url(config, root), config.launch.phase_timeout_s
    has_waited = is_missing = False
    since_s: dict[str, float] = {}

    def look() -> int:
        nonlocal is_missing
        try:
            return _committed(config, root, since_s, begins=begins)
        except CheckpointsMissing:
            is_missing = True
            raise

    def wait_said(error: str) -> None:
        nonlocal has_waited
        has_waited = True
        what = error if is_missing else f"the checkpoint store {url} does not answer ({error})"
        say(f"{what.rstrip('.')}; waiting for it, up to {limit_s:g} s (launch.phase_timeout_s)")

    try:
        found = until_answered(look, errors=_ERRORS, limit_s=limit_s, is_told=is_told, say=wait_said)
    except CheckpointsMissing:
        raise
    except _ERRORS as error:
        raise StoreUnreachable(
            f"the checkpoint store {url} did not answer for {limit_s:g} s (launch.phase_timeout_s): {error}. "
            f"See that it can be reached from here, then `yatt resume {root}` goes on."
        ) from error
    if has_waited and found is not None:
        say("the checkpoint store answers again")
    return found


def _committed(
    config: RunConfig, root: Path, since_s: dict[str, float] | None = None, *, begins: bool = False
) -> int:
    limit_s = config.launch.phase_timeout_s
    store = FileFaults(open_run_store(config, root), store_limit_s=limit_s, since_s=since_s)
    if begins and owner_of(store) == config.run.id:
        take_over(store, config, RunPaths(root))
    if manifest := Checkpoints(store, 0).newest().manifest:
        return manifest.iteration
    check_presence(store, store_url(config, root), RunPaths(root))
    return 0
