"""Ends this controller if a newer attempt of the run exists, or the leader continues without it."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from yatt import clock
from yatt.adapters.files.files import read_or_none, record_in
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.run_folder.attempt_claim import check_newest
from yatt.errors import Excluded, FolderGone
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
NEWER_CHECK_S = 5.0
STEADY_S = 30.0
"""Longest pause between two checks of a node of a large run while it hears of the leader, which checks often:
512 nodes would open 200 files a second."""

MANY_NODES = 16
"""A run with more nodes is a large one."""

QUIET_S = 3.0
GONE_CHECKS = 3
"""Number of checks that must fail in a row, because a mount may be missing for a moment."""


def may_wait(node: int, num_nodes: int, silence_s: Callable[[], float]) -> bool:
    """Whether a node's check may wait: the run is large, and it hears of its leader.

    Args:
        silence_s: returns the seconds since the leader's last message.
    """
    return node > 0 and num_nodes > MANY_NODES and silence_s() < QUIET_S


async def watch_newer_attempt(
    paths: RunPaths,
    attempt: int,
    node: int,
    life: int = 1,
    period_s: float = NEWER_CHECK_S,
    is_steady: Callable[[], bool] = bool,
) -> None:
    """Never returns; raises when this controller must not continue.

    A run folder that is unreadable for a while does not end it: every write is fenced anyway, and this check
    only detects a newer attempt early.

    Args:
        is_steady: whether a check may wait, up to `STEADY_S` since the last one.

    Raises:
        StaleAttempt: a newer attempt was claimed.
        Excluded: the leader has recorded that this process is lost.
        FolderGone: the run folder was missing in `GONE_CHECKS` checks in a row.
    """
    num_gone, looked_s = 0, -STEADY_S
    while True:
        if is_steady() and clock.monotonic_s() - looked_s < STEADY_S:
            await asyncio.sleep(period_s)
            continue
        looked_s = clock.monotonic_s()
        try:
            num_gone = 0 if await call_in_thread(paths.root.is_dir) else num_gone + 1
            if num_gone >= GONE_CHECKS:
                raise FolderGone(f"{paths.root} is gone: somebody removed or moved it")
            await call_in_thread(partial(check_newest, paths, attempt))
            lost = record_in(await call_in_thread(partial(read_or_none, paths.lost(attempt, node))), attempt)
        except OSError as error:
            _LOG.warning("the run folder cannot be read: %s", error)
            lost = None
        if lost and lost["life"] >= life:
            raise Excluded(f"the leader continues without this node: it {lost['why']}")
        await asyncio.sleep(period_s)
