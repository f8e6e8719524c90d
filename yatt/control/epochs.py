"""Epochs: every start of a run claims a number on the shared filesystem, strictly increasing.

The number fences everything the start writes; whoever finds a higher one than its own ends itself. A
claim is an exclusive create that survives lost replies (see yatt.adapters.files.claim).
"""

import os
import socket

from yatt.adapters.files import claim, make_private, sealed
from yatt.errors import StaleEpoch
from yatt.paths import RunPaths


def newest_epoch(paths: RunPaths) -> int:
    """Highest epoch that was claimed, 0 if none."""
    if not paths.epochs.is_dir():
        return 0
    return max((int(p.name) for p in paths.epochs.iterdir() if p.name.isdigit()), default=0)


def claim_epoch(paths: RunPaths) -> int:
    """Claim the next epoch for this start."""
    make_private(paths.epochs)
    epoch = newest_epoch(paths) + 1
    who = {"host": socket.gethostname(), "pid": os.getpid()}
    while not claim(paths.epochs / f"{epoch:06d}", sealed(who, epoch)):
        epoch += 1
    return epoch


def check_newest(paths: RunPaths, epoch: int) -> None:
    """Refuse to go on as a ghost.

    Raises:
        StaleEpoch: a higher epoch was claimed.
    """
    newest = newest_epoch(paths)
    if newest > epoch:
        raise StaleEpoch(f"epoch {newest} was claimed while {epoch} was running: this attempt is over")
