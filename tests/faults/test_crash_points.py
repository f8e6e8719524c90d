"""SIGKILL before and after every system call of a save: host copy, upload, commit, removal of old ones.

A forked process runs three saves of a rank's state, and is killed at one call. Then the next start must find
a whole checkpoint, all of whose bytes are of one iteration, and remove what the killed one left. Samples by a
seed that changes each day; `YATT_CRASH_POINTS=all` (in `make soak`) takes every call.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from yatt.adapters.host_segment import SegmentReader, SegmentWriter, Stamp, plan_path, segment_path
from yatt.checkpoint.manifest import Checkpoints, Manifest
from yatt.checkpoint.pieces import check_piece
from yatt.checkpoint.retention import retain
from yatt.checkpoint.store import FolderStore, Store
from yatt.config.operation import CheckpointSection
from yatt.errors import WorkerFailed
from yatt.records.message import PlannedPiece, SavePlan
from yatt.uploader import upload as upload_module
from yatt.uploader.upload import Throttle, UploadJob

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

CALLS = (
    "open", "write", "pwrite", "replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir", "fsync",
    "stat", "scandir", "posix_fallocate", "close",
)  # fmt: skip
FILES, PIECES, BYTES = 9, 2, 4000
SAVES = (2, 3, 4, 5)
SAMPLE = 150


class Rank:
    """A trainer rank: each byte of its state is the iteration's number."""

    def __init__(self, memory: Path, attempt: int) -> None:
        self.stem, self._attempt = memory / f"rank-{attempt:05d}", attempt
        pieces = [self._piece(number) for number in range(FILES * PIECES)]
        files = tuple(tuple(pieces[i : i + PIECES]) for i in range(0, len(pieces), PIECES))
        self._segment = SegmentWriter(segment_path(self.stem, "weights"), len(pieces) * BYTES)
        plan_path(self.stem).write_bytes(msgspec.msgpack.encode(SavePlan(rank=0, files=files)))

    def _piece(self, number: int) -> PlannedPiece:
        return PlannedPiece(
            key=f"main.p{number}", dtype="uint8", global_shape=(BYTES,), global_offset=(0,),
            local_shape=(BYTES,), area="weights", at=number * BYTES, size_bytes=BYTES,
        )  # fmt: skip

    def copies(self, iteration: int) -> Stamp:
        self._segment.invalidate()
        half = len(self._segment.data) // 2
        self._segment.data[:half] = bytes([iteration]) * half
        os.stat(self.stem.parent)  # a point to be killed at, between two halves
        self._segment.data[half:] = bytes([iteration]) * (len(self._segment.data) - half)
        self._segment.complete(Stamp(self._attempt, iteration))
        return Stamp(self._attempt, iteration)


def save(rank: Rank, store: Store, checkpoints: Checkpoints, attempt: int, iteration: int) -> None:
    """What trainer, uploader and leader do for one save."""
    prefix, stamp = checkpoints.prefix(iteration), rank.copies(iteration)
    job = UploadJob(store, prefix, [rank.stem], stamp, throttle=Throttle(0), tick=lambda: None)
    files = job.run()
    job.close()
    common = msgspec.Raw(b"{}")
    checkpoints.commit(
        Manifest(
            iteration=iteration, attempt=attempt, parent=checkpoints.parent, config_hash="", files=files,
            common=common, nodes=(),
        )
    )  # fmt: skip
    retain(checkpoints, CheckpointSection(keep=2))


def attempt_of(root: Path, memory: Path, attempt: int, iterations: tuple[int, ...]) -> None:
    store = FolderStore(root)
    checkpoints = Checkpoints(store, attempt)
    checkpoints.adopt(checkpoints.newest().manifest)
    rank = Rank(memory, attempt)
    for iteration in iterations:
        save(rank, store, checkpoints, attempt, iteration)


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
            attempt_of(root, memory, 2, SAVES)
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
    attempt_of(root, memory, 1, (1,))
    return root, memory


def check(root: Path, memory: Path) -> tuple[int, str]:
    """What the next start finds; gives the iteration, and the state of the killed host copy."""
    store = FolderStore(root)
    checkpoints = Checkpoints(store, 3)
    found = checkpoints.newest().manifest
    assert found is not None, "there is a whole checkpoint"
    for file in found.files:
        for piece in file.tensors:
            (data,) = store.read_ranges(file.path, [(piece.begin, piece.begin + piece.size_bytes)])
            check_piece(file, piece, data)
            assert set(data) == {found.iteration}, "bytes of another iteration"
    attempt_of(root, memory, 3, (found.iteration + 1, found.iteration + 2))
    names = {path.name.partition("-")[0] for path in root.glob("global_step_*/*")}
    assert names == {"000003"}, f"left by killed attempts: {names}"
    assert not list(root.glob("global_step_*/**/.*")), "unfinished files are left"
    return found.iteration, state_of(memory)


def state_of(memory: Path) -> str:
    """The killed attempt's host copy: absent, being changed, or whole."""
    try:
        reader = SegmentReader(segment_path(memory / "rank-00002", "weights"))
    except WorkerFailed:
        return "absent"
    stamp = reader.stamp()
    if stamp is not None:
        assert set(bytes(reader.data)) == {stamp.version}, "a stamp over a mix"
    reader.close()
    return "changing" if stamp is None else "whole"


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
    seed = int(os.environ.get("YATT_CRASH_SEED", time.strftime("%Y%m%d")))
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
