"""Attempt numbers: every attempt claims a strictly increasing number on the shared filesystem.

The number fences everything that the attempt writes; a process that finds a higher number ends itself. The
rules are in `yatt.core.attempts.claims`; this module applies them to the run folder.
"""

import logging
import os
import socket

from yatt.adapters.files.files import (
    create_exclusively,
    make_within,
    read_or_none,
    sealed_record,
    temporary_files,
    write_atomically,
)
from yatt.adapters.files.patience import with_retries
from yatt.adapters.run_folder.ledger import newest_attempt
from yatt.clock import wall_iso
from yatt.core.attempts.claims import Checked, Claim, ClaimStage, FileOwner, Linked, Looked, claim_step
from yatt.errors import StaleAttempt
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)


def claim_attempt(paths: RunPaths) -> int:
    """Claims the next attempt number for this start."""
    with_retries(lambda: make_within(paths.root, paths.claims))
    return with_retries(lambda: _claimed(paths))


def _claimed(paths: RunPaths) -> int:
    state = claim_step(Claim(), Looked(newest_attempt(paths)))
    while state.stage is not ClaimStage.WON:
        found = _try(paths, state.attempt)
        state = claim_step(claim_step(state, Linked()), Checked(found))
    return state.attempt


def skip_attempts(paths: RunPaths, newest: int) -> None:
    """Makes the next claimed number higher than `newest`, for a new folder of an existing run."""
    if newest_attempt(paths) < newest:
        make_within(paths.root, paths.claims)
        _try(paths, newest)


def _try(paths: RunPaths, attempt: int) -> FileOwner:
    who = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID", "")}
    path = paths.claims / f"{attempt:06d}"
    if create_exclusively(path, sealed_record(who, attempt)):
        return FileOwner.MINE
    return FileOwner.NOBODYS if read_or_none(path) is None else FileOwner.OTHERS


def check_newest(paths: RunPaths, attempt: int) -> None:
    """Ends a stale attempt.

    Raises:
        StaleAttempt: a newer attempt was claimed.
    """
    newest = newest_attempt(paths)
    if newest > attempt:
        raise StaleAttempt(f"attempt {newest} was claimed while {attempt} was running: this attempt is over")


def remove_leftovers(paths: RunPaths, attempt: int) -> None:
    """Removes temporary files of dead writers; call it while no process of this attempt runs.

    Files that existed before `attempt` was confirmed as newest belong to this start or to stale attempts,
    because a newer start first claims its number in `claims/`. A stale attempt that loses its file fails, as
    intended.

    Raises:
        StaleAttempt: a newer attempt was claimed.
    """
    found = temporary_files(
        paths.root, skip=(paths.claims.name, paths.tracker("wandb").name, paths.trackers.name)
    )
    check_newest(paths, attempt)
    for path in found:
        path.unlink(missing_ok=True)


def mark_finished(paths: RunPaths, attempt: int) -> None:
    """Records that the run is finished, once no process of it runs.

    Raises:
        StaleAttempt: a newer attempt was claimed, which has to end the run.
    """
    remove_leftovers(paths, attempt)
    write_atomically(paths.finished, sealed_record({"wall": wall_iso()}, attempt))
