"""Ends processes that this node's workers started and left; `yatt.core.attempts.orphans` decides which
ones."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from yatt.adapters.processes.orphans import end_orphans, find_orphans, kill_orphan, reap_children
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.core.attempts.orphans import doomed_orphans

CHECK_S = 1.0
END_S = 3.0


class OrphanWatch:
    """Watches the orphans of one controller.

    Args:
        living: returns the running workers: pid to the mark in their environment.
    """

    def __init__(self, living: Callable[[], dict[int, str]]) -> None:
        self._living = living
        self._known: set[int] = set()
        self._has_ended = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Reaps and ends orphans, forever. If there are no descriptors or threads, it tries again later."""
        while True:
            self._wake.clear()
            with contextlib.suppress(OSError):
                await self.look()
            with contextlib.suppress(TimeoutError):  # `wait_for` would lose a cancellation as it is woken
                async with asyncio.timeout(CHECK_S):
                    await self._wake.wait()

    def worker_ended(self) -> None:
        """Notes that a worker has just ended."""
        self._has_ended = True
        self._wake.set()

    async def look(self) -> None:
        """Ends the doomed orphans. It reads in a thread, since reading the data of a hung process may block.

        Raises:
            OSError: no thread is available.
        """
        had_ended, self._has_ended = self._has_ended, False
        try:
            found, ended = await call_in_thread(partial(find_orphans, frozenset(self._living())))
        except OSError:
            self._has_ended |= had_ended
            raise
        living = self._living()  # a worker may have been started, or have ended, meanwhile
        reap_children(set(ended) - living.keys())
        found = [each for each in found if each.pid not in living]
        ending = doomed_orphans(found, living, known=self._known, has_ended=had_ended or self._has_ended)
        for pid in ending:
            kill_orphan(pid)
        self._known = {each.pid for each in found}.difference(ending)

    async def close(self, *, only_marked: bool = False) -> None:
        """Ends all orphans; called when every worker has ended or cannot be ended.

        Args:
            only_marked: only those with a worker's mark: this process may have other children.
        """
        living = frozenset(self._living())
        await call_in_thread(partial(end_orphans, living, END_S, only_marked=only_marked))
