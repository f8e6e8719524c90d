"""Epochs: every start of a run claims a number on the shared filesystem, strictly increasing.

The number fences everything the start writes; whoever finds a higher one than its own ends itself. The
rules are `yatt.core.epochs`; here they meet the run folder.
"""

import asyncio
import logging
import os
import socket
from functools import partial

from yatt.adapters.files import claim, make_within, publish, read_or_none, sealed, temporaries, unsealed
from yatt.adapters.ledger import newest_epoch
from yatt.adapters.patience import patiently
from yatt.adapters.thread_call import call_in_thread
from yatt.clock import wall_iso
from yatt.core.epochs import Checked, Claim, ClaimStage, FileOwner, Linked, Looked, claim_step
from yatt.errors import FolderGone, StaleEpoch, WorkerFailed
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
EPOCH_CHECK_S = 5.0
GONE_CHECKS = 3
"""A mount that flickers is no removed folder."""


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


async def watch_epoch(paths: RunPaths, epoch: int, node: int, period_s: float = EPOCH_CHECK_S) -> None:
    """Return never, or raise once this controller counts no more.

    A folder that cannot be read for a while is no reason to end: what counts is fenced where it is written,
    this is only the early word.

    Raises:
        StaleEpoch: a higher epoch was claimed.
        WorkerFailed: the leader has written that this node is lost.
        FolderGone: the run folder was not there at `GONE_CHECKS` looks in a row.
    """
    num_gone = 0
    while True:
        try:
            num_gone = 0 if await call_in_thread(paths.root.is_dir) else num_gone + 1
            if num_gone >= GONE_CHECKS:
                raise FolderGone(f"{paths.root} is gone: somebody removed or moved it")
            await call_in_thread(partial(check_newest, paths, epoch))
            lost = unsealed(await call_in_thread(partial(read_or_none, paths.lost(epoch, node))), epoch)
        except OSError as error:
            _LOG.warning("the run folder cannot be read: %s", error)
            lost = None
        if lost:
            raise WorkerFailed(f"the leader goes on without this node: it {lost['why']}")
        await asyncio.sleep(period_s)


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
