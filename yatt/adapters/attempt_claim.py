"""Epochs: every start of a run claims a number on the shared filesystem, strictly increasing.

The number fences everything the start writes; whoever finds a higher one than its own ends itself. The
rules are `yatt.core.epochs`; here they meet the run folder.
"""

import logging
import os
import socket

from yatt.adapters.files import claim, make_within, publish, read_or_none, sealed, temporaries
from yatt.adapters.ledger import newest_epoch
from yatt.adapters.patience import patiently
from yatt.clock import wall_iso
from yatt.core.epochs import Checked, Claim, ClaimStage, FileOwner, Linked, Looked, claim_step
from yatt.errors import StaleEpoch
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)


def claim_epoch(paths: RunPaths) -> int:
    """Claim the next epoch for this start."""
    patiently(lambda: make_within(paths.root, paths.epochs))
    return patiently(lambda: _claimed(paths))


def _claimed(paths: RunPaths) -> int:
    state = claim_step(Claim(), Looked(newest_epoch(paths)))
    while state.stage is not ClaimStage.WON:
        found = _try(paths, state.epoch)
        state = claim_step(claim_step(state, Linked()), Checked(found))
    return state.epoch


def skip_epochs(paths: RunPaths, newest: int) -> None:
    """See to it that the next claim is above `newest`: a folder that was made anew, of a run that is not."""
    if newest_epoch(paths) < newest:
        make_within(paths.root, paths.epochs)
        _try(paths, newest)


def _try(paths: RunPaths, epoch: int) -> FileOwner:
    who = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID", "")}
    path = paths.epochs / f"{epoch:06d}"
    if claim(path, sealed(who, epoch)):
        return FileOwner.MINE
    return FileOwner.NOBODYS if read_or_none(path) is None else FileOwner.OTHERS


def check_newest(paths: RunPaths, epoch: int) -> None:
    """Refuse to go on as a ghost.

    Raises:
        StaleEpoch: a higher epoch was claimed.
    """
    newest = newest_epoch(paths)
    if newest > epoch:
        raise StaleEpoch(f"epoch {newest} was claimed while {epoch} was running: this attempt is over")


def remove_leftovers(paths: RunPaths, epoch: int) -> None:
    """Remove temporary files of writers that died; call it while nothing of this attempt is at work.

    What was there before `epoch` was seen to be the newest belongs to this start or to ghosts: a newer start
    claims, in `epochs/`, before it writes anything else. A ghost whose file goes fails, as it should.

    Raises:
        StaleEpoch: a higher epoch was claimed.
    """
    found = temporaries(paths.root, skip=(paths.epochs.name, paths.wandb.name))
    check_newest(paths, epoch)
    for path in found:
        path.unlink(missing_ok=True)


def mark_finished(paths: RunPaths, epoch: int) -> None:
    """Note that the run is over, once nothing of it is at work.

    Raises:
        StaleEpoch: a higher epoch was claimed; the run is that start's to end.
    """
    remove_leftovers(paths, epoch)
    publish(paths.finished, sealed({"wall": wall_iso()}, epoch))
