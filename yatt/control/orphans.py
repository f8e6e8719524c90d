"""Ends what this node's workers have started and left: `yatt.core.orphans` says what has to end."""

import asyncio
from collections.abc import Callable
from functools import partial

from yatt.adapters.orphans import end_orphans, kill_orphan, orphans
from yatt.adapters.thread_call import call_in_thread
from yatt.core.orphans import doomed

CHECK_S = 1.0
END_S = 3.0


class OrphanWatch:
    """The orphans of one controller.

    Args:
        living: gives the workers that run: pid to the mark in their environment.
    """

    def __init__(self, living: Callable[[], dict[int, str]]) -> None:
        self._living = living
        self._known: set[int] = set()

    async def run(self) -> None:
        """Reap and end orphans, for ever."""
        while True:
            self.look(has_ended=False)
            await asyncio.sleep(CHECK_S)

    def look(self, *, has_ended: bool) -> None:
        """End the orphans that have to.

        Args:
            has_ended: a worker has just ended.
        """
        living = self._living()
        found = orphans(living)
        ending = doomed(found, living, known=self._known, has_ended=has_ended)
        for pid in ending:
            kill_orphan(pid)
        self._known = {each.pid for each in found}.difference(ending)

    async def close(self) -> None:
        """Every worker has ended, or cannot be: end all orphans."""
        await call_in_thread(partial(end_orphans, frozenset(self._living()), END_S))
