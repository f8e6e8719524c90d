"""Ends this controller if a newer attempt of the run exists, or the leader continues without it."""

import asyncio
import logging
from functools import partial

from yatt.adapters.attempt_claim import check_newest
from yatt.adapters.files import read_or_none, unsealed
from yatt.adapters.thread_call import call_in_thread
from yatt.errors import Excluded, FolderGone
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
NEWER_CHECK_S = 5.0
GONE_CHECKS = 3
"""Number of checks that must fail in a row, because a mount may be missing for a moment."""


async def watch_newer_attempt(
    paths: RunPaths, attempt: int, node: int, life: int = 1, period_s: float = NEWER_CHECK_S
) -> None:
    """Never returns; raises when this controller must not continue.

    A run folder that is unreadable for a while does not end it: every write is fenced anyway, and this check
    only detects a newer attempt early.

    Raises:
        StaleAttempt: a newer attempt was claimed.
        Excluded: the leader has recorded that this process is lost.
        FolderGone: the run folder was missing in `GONE_CHECKS` checks in a row.
    """
    num_gone = 0
    while True:
        try:
            num_gone = 0 if await call_in_thread(paths.root.is_dir) else num_gone + 1
            if num_gone >= GONE_CHECKS:
                raise FolderGone(f"{paths.root} is gone: somebody removed or moved it")
            await call_in_thread(partial(check_newest, paths, attempt))
            lost = unsealed(await call_in_thread(partial(read_or_none, paths.lost(attempt, node))), attempt)
        except OSError as error:
            _LOG.warning("the run folder cannot be read: %s", error)
            lost = None
        if lost and lost["life"] >= life:
            raise Excluded(f"the leader continues without this node: it {lost['why']}")
        await asyncio.sleep(period_s)
