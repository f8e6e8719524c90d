"""The newest committed iteration, read by the launcher between attempts.

If the checkpoint store is down, the launcher waits up to `launch.phase_timeout_s` instead of ending the run
or starting an attempt that would fail.
"""

from collections.abc import Callable
from pathlib import Path

from yatt.adapters.files.patience import until_answered
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.ownership import store_owner
from yatt.checkpoint.commit.run_store import check_presence, open_run_store, store_url
from yatt.checkpoint.store.file_faults import FileFaults
from yatt.config.schema import RunConfig
from yatt.errors import CheckpointsMissing, StoreUnreachable
from yatt.launch.folder.folder import take_over
from yatt.paths import RunPaths

ANSWER_S = 10.0
"""Longest wait for the store when the answer is only needed for a message."""

_ERRORS = (StoreUnreachable, OSError)


def committed_if_known(config: RunConfig, root: Path, *, otherwise: int) -> int:
    """Returns the newest committed iteration, 0 if none; `otherwise` if the store does not answer soon."""
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
    """Returns the newest committed iteration, 0 if none; waits while the store is down.

    Args:
        begins: this is the folder's first attempt: let this folder take the store over.
        is_told: whether the launcher has to end; the result is then None.
        say: prints one line for the user.

    Raises:
        StoreUnreachable: no answer within `launch.phase_timeout_s`.
        CheckpointsMissing: the store answers, but lacks the checkpoints that the ledger lists.
        StoreTakenOver: another run folder has taken the store over.
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
            f"Make sure that it can be reached from this machine, then run `yatt resume {root}`."
        ) from error
    if has_waited and found is not None:
        say("the checkpoint store answers again")
    return found


def _committed(
    config: RunConfig, root: Path, since_s: dict[str, float] | None = None, *, begins: bool = False
) -> int:
    if not config.trains:
        return 0
    limit_s = config.launch.phase_timeout_s
    store = FileFaults(open_run_store(config, root), store_limit_s=limit_s, since_s=since_s)
    if begins and store_owner(store) == config.run.id:
        take_over(store, config, RunPaths(root))
    if manifest := Checkpoints(store, 0).newest().manifest:
        return manifest.iteration
    check_presence(store, store_url(config, root), RunPaths(root))
    return 0
