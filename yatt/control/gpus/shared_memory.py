"""Removes the shared memory that this node's workers leave when they are killed.

Libraries remove theirs at an orderly end; a killed process group cannot. What each group uses is noted while
it lives, soon after the files appear, also in the node's scratch folder: if the controller is killed, whoever
removes that folder removes the files first (`yatt.control.gpus.scratch`).
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from yatt import clock
from yatt.adapters import shared_memory
from yatt.adapters.memory import ProcessGroups
from yatt.adapters.thread_call import call_in_thread

CHECK_S = 0.5
LOOK_S = 2.0
"""How long a look at the processes is waited for."""

UNUSED_S = 2.0
"""How long the kernel may take to take apart the memory of a killed process."""

NOTES = "shared-memory.json"
_NOBODY = 0
"""In place of a process group: it has ended."""


class SharedMemoryWatch:
    """What this node's process groups use.

    Args:
        folder: where the notes are kept.
        groups: gives the process groups of the workers that live.
    """

    def __init__(self, folder: Path, groups: Callable[[], Iterable[int]]) -> None:
        self._notes, self._groups, self._process_groups = folder / NOTES, groups, ProcessGroups()
        self._known = self._strangers = shared_memory.listed()
        self._used: dict[int, set[str]] = {}

    async def run(self) -> None:
        """Note new files, for ever."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.look()

    async def look(self) -> None:
        """Note which files the groups use, if there are new ones. A process that hangs in the kernel may keep
        its look waiting: then it is made again later."""
        now = shared_memory.listed()
        groups = list(self._groups())
        if not now - self._known or not groups:
            return
        with contextlib.suppress(OSError, TimeoutError):
            found = await asyncio.wait_for(call_in_thread(partial(self._look, groups)), LOOK_S)
            for group, names in found.items():
                self._used.setdefault(group, set()).update(names - self._strangers)
            self._known = now
            await asyncio.wait_for(call_in_thread(self._write), LOOK_S)

    async def ended(self, group: int) -> None:
        """A process group was killed: remove what it used and nobody uses any more."""
        await self._remove(self._used.pop(group, set()))

    async def close(self) -> None:
        """Every worker has ended: remove all that is left."""
        await self._remove(set().union(*self._used.values()))

    async def _remove(self, names: set[str]) -> None:
        left = names
        with contextlib.suppress(OSError):
            left = await call_in_thread(partial(shared_memory.remove_unused, names, UNUSED_S))
        if left:
            self._used.setdefault(_NOBODY, set()).update(left)  # `close` tries again

    def _look(self, groups: list[int]) -> dict[int, set[str]]:
        members = self._process_groups.members(groups, clock.monotonic_s())
        pids: dict[int, list[int]] = {}
        for pid, group in members.items():
            pids.setdefault(group, []).append(pid)
        return {group: shared_memory.used_by(each) for group, each in pids.items()}

    def _write(self) -> None:
        self._notes.write_text(json.dumps(sorted(set().union(*self._used.values()))))


def remove_noted(folder: Path) -> bool:
    """Remove the shared memory that a dead controller noted in its scratch folder; whether none is left."""
    try:
        names = json.loads((folder / NOTES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    if not isinstance(names, list):
        return True
    return not shared_memory.remove_unused([name for name in names if isinstance(name, str)], UNUSED_S)
