"""Shared memory that killed process groups leave: real files in /dev/shm, real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from yatt.adapters.node_local import shared_memory
from yatt.adapters.node_local.shared_memory import remove_unused, used_by
from yatt.control.gpus.processes.shared_memory import SharedMemoryWatch, remove_noted

MAKES = """
import multiprocessing, os, sys, time
from multiprocessing.shared_memory import SharedMemory

lock = multiprocessing.get_context("spawn").Lock()
made = SharedMemory(create=True, size=4096)
known = [SharedMemory(name=name) for name in sys.argv[1:]]
if os.fork() == 0:
    time.sleep(600)
print(made.name, lock._semlock.name, flush=True)
time.sleep(600)
"""


Start = Callable[..., tuple[int, set[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process group of a parent and a child; gives its id and the files that it has made."""
    groups: list[subprocess.Popen[str]] = []
    files: set[str] = set()

    def begin(*names: str) -> tuple[int, set[str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", MAKES, *names], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        groups.append(process)
        assert process.stdout is not None
        made, lock = process.stdout.readline().split()
        files.update({made, f"sem.{lock.lstrip('/')}"})
        return process.pid, {made, f"sem.{lock.lstrip('/')}"}

    yield begin
    for process in groups:
        end(process.pid)
        process.communicate()
    for name in there(files):  # of a test that failed
        (shared_memory.FOLDER / name).unlink()


def end(group: int) -> None:
    """SIGKILL the whole group, as a controller does."""
    if os.path.exists(f"/proc/{group}"):
        os.killpg(group, signal.SIGKILL)
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT)


def there(names: set[str]) -> set[str]:
    return {name for name in names if (shared_memory.FOLDER / name).exists()}


def test_files_are_known_by_who_uses_them_and_removed_once_nobody_does(start: Start) -> None:
    group, made = start()
    assert used_by([group]) == made == there(made)
    assert remove_unused(made, limit_s=0.3) == made == there(made), "somebody lives who uses them"
    end(group)
    assert there(made) == made, "a killed group cannot remove them"
    assert remove_unused(made, limit_s=5.0) == set() == there(made)


def test_other_names_are_never_removed(tmp_path: Path) -> None:
    plain = shared_memory.FOLDER / f"somebodys-{os.getpid()}"
    plain.write_text("data")
    try:
        names = [plain.name, f"psm_/../{plain.name}", f"../..{tmp_path}"]
        assert remove_unused(names, limit_s=0.0) == set()
        assert plain.exists()
    finally:
        plain.unlink()


def test_what_a_killed_group_leaves_is_removed_and_a_strangers_file_stays(
    start: Start, tmp_path: Path
) -> None:
    strangers = SharedMemory(create=True, size=4096)
    groups: list[int] = []
    watch = SharedMemoryWatch(tmp_path, lambda: groups)

    async def scene() -> None:
        first, made = start(strangers.name)
        second, others = start()
        groups.extend([first, second])
        await watch.look()
        end(first)
        groups.remove(first)
        await watch.ended(first)
        assert there(made) == set() and there(others) == others
        end(second)
        await watch.close()
        assert there(others) == set()
        assert there({strangers.name}), "it was there before any worker"

    try:
        asyncio.run(scene())
    finally:
        strangers.close()
        strangers.unlink()


def test_what_a_killed_controller_has_noted_is_removed_with_its_folder(start: Start, tmp_path: Path) -> None:
    groups: list[int] = []
    watch = SharedMemoryWatch(tmp_path, lambda: groups)
    group, made = start()
    groups.append(group)
    asyncio.run(watch.look())
    assert not remove_noted(tmp_path), "its processes live on"
    end(group)
    assert remove_noted(tmp_path) and there(made) == set()
    assert remove_noted(tmp_path), "nothing is left to remove"
