"""SIGKILL before and after every request of an attempt to an object store: restore, upload, commit, removal.

A proxy kills the process before it passes a request on, or before the reply. Then the next start must find a
whole checkpoint, all of whose bytes are of one iteration, and remove what the killed one left. Samples by a
seed that changes each day; `YATT_CRASH_POINTS=all` (in `make soak`) takes every point.
"""

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import boto3
import pytest

from tests.conftest import BUCKET, S3_KEYS, s3_server
from tests.crash_saves import SAVES, attempt_of, state_of, whole_checkpoint
from tests.faults.test_crash_points import where
from tests.seeds import seed_of
from tests.store_proxy import StoreProxy
from yatt.checkpoint.store import store as store_module
from yatt.checkpoint.store.store import Store, open_store
from yatt.checkpoint.store.unfinished import abort_uploads
from yatt.uploader import upload as upload_module

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

PART_BYTES, NUM_FILES = 4096, 3
"""A file has two parts or three."""

SAMPLE = 12


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that takes parts of any size."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log", S3_UPLOAD_PART_MIN_SIZE="1") as endpoint:
        yield endpoint


def store_at(url: str, endpoint: str) -> Store:
    return open_store(url, {"endpoint_url": endpoint}, 20.0)


def killed_attempt(url: str, endpoint: str, memory: Path) -> None:
    """In a process of its own; ends when it has all saves, or is killed."""
    os.environ.update(S3_KEYS)
    store_module.UPLOAD_PART_BYTES, upload_module.THREADS = PART_BYTES, 1
    attempt_of(store_at(url, endpoint), memory, 2, SAVES, NUM_FILES)


class Killer:
    """Counts points, and kills the process at one; the proxy's threads call it."""

    def __init__(self, point: int) -> None:
        self.point, self.count, self.lock = point, 0, threading.Lock()
        self.child: BaseProcess | None = None

    def __call__(self) -> bool:
        with self.lock:
            self.count += 1
            if self.count == self.point:
                assert self.child is not None and self.child.pid is not None
                os.kill(self.child.pid, signal.SIGKILL)
            return 0 < self.point <= self.count


def run_in_child(url: str, endpoint: str, memory: Path, point: int) -> int:
    """Attempt 2, killed at `point` (0: not at all); returns the number of points."""
    killer, context = Killer(point), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["s3fs", "tests.crash_saves"])
    with StoreProxy(endpoint, at_point=killer) as proxy:
        child = context.Process(target=killed_attempt, args=(url, proxy.endpoint, memory))
        with killer.lock:
            child.start()
            killer.child = child
        child.join()
    assert child.exitcode == (-signal.SIGKILL if point else 0)
    return killer.count


def fresh(folder: Path, endpoint: str) -> tuple[str, Path]:
    url, memory = f"s3://{BUCKET}/{folder.parent.name}-{folder.name}", folder / "memory"
    memory.mkdir(parents=True)
    attempt_of(store_at(url, endpoint), memory, 1, (1,), NUM_FILES)
    return url, memory


def check(url: str, endpoint: str, memory: Path) -> tuple[int, str]:
    """What the next start finds; returns the iteration, and the state of the killed host copy."""
    store, client = store_at(url, endpoint), boto3.client("s3", endpoint_url=endpoint)
    iteration = whole_checkpoint(store)
    abort_uploads(url, {"endpoint_url": endpoint}, before=3)
    attempt_of(store, memory, 3, (iteration + 1, iteration + 2), NUM_FILES)
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/global_step_").get("Contents", ())
    names = {entry["Key"].split("/")[2].partition("-")[0] for entry in listed}
    assert names == {"000003"}, f"left by killed attempts: {names}"
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    assert not [upload["Key"] for upload in uploads if upload["Key"].startswith(f"{prefix}/")]
    return iteration, state_of(memory)


def test_no_kill_leaves_anything_but_a_whole_checkpoint(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "UPLOAD_PART_BYTES", PART_BYTES)
    url, memory = fresh(tmp_path / "calm", endpoint)
    count = run_in_child(url, endpoint, memory, 0)
    points = list(range(1, count + 1))
    seed = seed_of("YATT_CRASH_SEED")
    if os.environ.get("YATT_CRASH_POINTS") != "all":
        first = random.Random(seed).random()  # evenly spread, so that each save is killed
        points = [points[int((index + first) * count / SAMPLE)] for index in range(SAMPLE)]
    seen: set[tuple[int, str]] = set()
    for point in points:
        url, memory = fresh(tmp_path / str(point), endpoint)
        run_in_child(url, endpoint, memory, point)
        with where(f"point {point} of {count}, seed {seed}"):
            seen.add(check(url, endpoint, memory))
    assert count >= 200, f"only {count} points were counted"
    assert {iteration for iteration, _ in seen} >= {2, 3}, f"{seen}, seed {seed}"
