"""Removes the shared memory that this node's workers leave when they are killed.

Libraries remove their files at an orderly end; a killed process group cannot. The files of each group are
noted soon after they appear, also in the node's scratch folder. If the controller is killed, the process that
removes that folder removes these files first (`yatt.control.gpus.processes.scratch`).
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from yatt import clock
from yatt.adapters.machine.memory import ProcessGroups
from yatt.adapters.node_local import shared_memory
from yatt.adapters.processes.thread_call import call_in_thread

CHECK_S = 0.5
LOOK_S = 2.0
"""Longest wait for a look at the processes."""

UNUSED_S = 2.0
"""Longest time for the kernel to free the memory of a killed process."""

NOTES = "shared-memory.json"
_NOBODY = 0
"""Stands for a process group that has ended."""


class SharedMemoryWatch:
    """Watches the shared memory that this node's process groups use.

    Args:
        folder: the folder for the notes.
        groups: returns the process groups of the running workers.
    """

    def __init__(self, folder: Path, groups: Callable[[], Iterable[int]]) -> None:
        self._notes, self._groups, self._process_groups = folder / NOTES, groups, ProcessGroups()
        self._known = self._strangers = shared_memory.shared_memory_files()
        self._used: dict[int, set[str]] = {}

    async def run(self) -> None:
        """Notes new files, forever."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.look()

    async def look(self) -> None:
        """Notes which files the groups use, if there are new files. A process that hangs in the kernel may
        block this look; then it is repeated later."""
        now = shared_memory.shared_memory_files()
        groups = list(self._groups())
        if not now - self._known or not groups:
            return
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LOOK_S):
                found = await call_in_thread(partial(self._look, groups))
            for group, names in found.items():
                self._used.setdefault(group, set()).update(names - self._strangers)
            self._known = now
            async with asyncio.timeout(LOOK_S):
                await call_in_thread(self._write)

    async def ended(self, group: int) -> None:
        """Removes the files of a killed process group that no process uses any more."""
        await self._remove(self._used.pop(group, set()))

    async def close(self) -> None:
        """Removes all remaining files; called when every worker has ended."""
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
    """Removes shared memory that a dead controller noted in this folder; returns whether none is left."""
    try:
        names = json.loads((folder / NOTES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    if not isinstance(names, list):
        return True
    return not shared_memory.remove_unused([name for name in names if isinstance(name, str)], UNUSED_S)
