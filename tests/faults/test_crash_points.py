"""SIGKILL before and after every system call of an attempt: restore, host copy, upload, commit, removal.

A forked process runs three saves of a rank's state, and is killed at one call. Then the next start must find
a whole checkpoint, all of whose bytes are of one iteration, and remove what the killed one left. Samples by a
seed that changes each day; `YATT_CRASH_POINTS=all` (in `make soak`) takes every call.
"""

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash_saves import SAVES, attempt_of, state_of, whole_checkpoint
from tests.seeds import seed_of
from yatt.checkpoint.store.store import FolderStore
from yatt.uploader import upload as upload_module

pytestmark = pytest.mark.faults

CALLS = (
    "open", "write", "pwrite", "pread", "replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir",
    "fsync", "stat", "scandir", "posix_fallocate", "close",
)  # fmt: skip
SAMPLE = 150


def counted(tell: Callable[[int], None]) -> Iterator[None]:
    """Wraps the system calls that change files; `tell` gets the number of each point."""
    number = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **more: Any) -> Any:
            nonlocal number
            tell(number := number + 1)
            found = call(*arguments, **more)
            tell(number := number + 1)
            return found

        return counting

    kept = {name: getattr(os, name) for name in CALLS}
    for name, call in kept.items():
        setattr(os, name, wrapped(call))
    yield
    for name, call in kept.items():
        setattr(os, name, call)


def run_in_child(root: Path, memory: Path, point: int) -> int:
    """Attempt 2 in a forked process, killed at `point` (0: not at all); gives the number of points."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, seen = 1, 0

        def at(number: int) -> None:
            nonlocal seen
            seen = number
            if number == point:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            upload_module.THREADS = 1  # so that points have the same numbers each time
            watch = counted(at)
            next(watch)
            attempt_of(FolderStore(root), memory, 2, SAVES)
            next(watch, None)
            os.write(tell, str(seen).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(tell)
    _, status = os.waitpid(pid, 0)
    count = os.read(told, 64)
    os.close(told)
    assert os.WIFSIGNALED(status) if point else os.WEXITSTATUS(status) == 0, status
    return int(count or 0)


def fresh(folder: Path) -> tuple[Path, Path]:
    root, memory = folder / "store", folder / "memory"
    memory.mkdir(parents=True)
    attempt_of(FolderStore(root), memory, 1, (1,))
    return root, memory


def check(root: Path, memory: Path) -> tuple[int, str]:
    """What the next start finds; gives the iteration, and the state of the killed host copy."""
    store = FolderStore(root)
    iteration = whole_checkpoint(store)
    attempt_of(store, memory, 3, (iteration + 1, iteration + 2))
    names = {path.name.partition("-")[0] for path in root.glob("global_step_*/*")}
    assert names == {"000003"}, f"left by killed attempts: {names}"
    assert not list(root.glob("global_step_*/**/.*")), "unfinished files are left"
    return iteration, state_of(memory)


@contextlib.contextmanager
def where(place: str) -> Iterator[None]:
    """Adds the place to what fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(place)
        raise


def test_no_kill_leaves_anything_but_a_whole_checkpoint(tmp_path: Path) -> None:
    count = run_in_child(*fresh(tmp_path / "calm"), 0)
    points = list(range(1, count + 1))
    seed = seed_of("YATT_CRASH_SEED")
    if os.environ.get("YATT_CRASH_POINTS") != "all":
        points = sorted(random.Random(seed).sample(points, SAMPLE))
    seen: set[tuple[int, str]] = set()
    for point in points:
        root, memory = fresh(tmp_path / str(point))
        run_in_child(root, memory, point)
        with where(f"point {point} of {count}, seed {seed}"):
            seen.add(check(root, memory))
    assert count >= 1000, f"only {count} points were counted"
    assert {iteration for iteration, _ in seen} >= {2, 3}, f"{seen}, seed {seed}"
