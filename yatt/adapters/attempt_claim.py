"""Attempts: every start of a run claims a number on the shared filesystem, strictly increasing.

The number fences everything the start writes; whoever finds a higher one than its own ends itself. The
rules are `yatt.core.claims`; here they meet the run folder.
"""

import logging
import os
import socket

from yatt.adapters.files import claim, make_within, publish, read_or_none, sealed, temporaries
from yatt.adapters.ledger import newest_attempt
from yatt.adapters.patience import patiently
from yatt.clock import wall_iso
from yatt.core.claims import Checked, Claim, ClaimStage, FileOwner, Linked, Looked, claim_step
from yatt.errors import StaleAttempt
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)


def claim_attempt(paths: RunPaths) -> int:
    """Claim the next attempt for this start."""
    patiently(lambda: make_within(paths.root, paths.claims))
    return patiently(lambda: _claimed(paths))


def _claimed(paths: RunPaths) -> int:
    state = claim_step(Claim(), Looked(newest_attempt(paths)))
    while state.stage is not ClaimStage.WON:
        found = _try(paths, state.attempt)
        state = claim_step(claim_step(state, Linked()), Checked(found))
    return state.attempt


def skip_attempts(paths: RunPaths, newest: int) -> None:
    """See to it that the next claim is above `newest`: a folder that was made anew, of a run that is not."""
    if newest_attempt(paths) < newest:
        make_within(paths.root, paths.claims)
        _try(paths, newest)


def _try(paths: RunPaths, attempt: int) -> FileOwner:
    who = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID", "")}
    path = paths.claims / f"{attempt:06d}"
    if claim(path, sealed(who, attempt)):
        return FileOwner.MINE
    return FileOwner.NOBODYS if read_or_none(path) is None else FileOwner.OTHERS


def check_newest(paths: RunPaths, attempt: int) -> None:
    """Refuse to go on as a stale attempt.

    Raises:
        StaleAttempt: a newer attempt was claimed.
    """
    newest = newest_attempt(paths)
    if newest > attempt:
        raise StaleAttempt(f"attempt {newest} was claimed while {attempt} was running: this attempt is over")


def remove_leftovers(paths: RunPaths, attempt: int) -> None:
    """Remove temporary files of writers that died; call it while nothing of this attempt is at work.

    What was there before `attempt` was seen to be the newest belongs to this start or to stale ones: a newer
    start claims, in `claims/`, before it writes anything else. A stale attempt whose file is removed fails.

    Raises:
        StaleAttempt: a newer attempt was claimed.
    """
    found = temporaries(paths.root, skip=(paths.claims.name, paths.wandb.name))
    check_newest(paths, attempt)
    for path in found:
        path.unlink(missing_ok=True)


def mark_finished(paths: RunPaths, attempt: int) -> None:
    """Note that the run is over, once nothing of it is at work.

    Raises:
        StaleAttempt: a newer attempt was claimed; the run is that start's to end.
    """
    remove_leftovers(paths, attempt)
    publish(paths.finished, sealed({"wall": wall_iso()}, attempt))
