"""One file that cannot be read is damage, if the store answers; a store that does not is waited for."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.checkpoint.test_manifest import manifest, started
from tests.unit.core.test_placement import config
from yatt.checkpoint.commit.ownership import claim_store
from yatt.checkpoint.store.file_faults import FileFaults
from yatt.checkpoint.store.patient import PatientStore
from yatt.checkpoint.store.store import FolderStore
from yatt.checkpoint.store.store_errors import is_told_to_wait, may_pass
from yatt.config.schema import RunConfig
from yatt.errors import CheckpointError, StoreUnreachable
from yatt.launch.folder.committed import await_committed

SHARD, MANIFEST = (
    "global_step_1/000001-aaaaaaaa/rank-00000-00000.safetensors",
    "manifests/00000001.000001.json",
)


class Weather:
    """Files under a folder that fail: maps a part of a path to the number of its error."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.num_failed = 0

    def meet(self, path: object) -> None:
        for word, number in self.failing.items():
            if word in str(path):
                self.num_failed += 1
                raise OSError(number, os.strerror(number), str(path))


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Weather:
    weather, opening = Weather(), os.open

    def opened(path, *arguments, **more):
        weather.meet(path)
        return opening(path, *arguments, **more)

    monkeypatch.setattr(os, "open", opened)
    return weather


@pytest.fixture
def folder(tmp_path: Path) -> FolderStore:
    store = FolderStore(tmp_path)
    claim_store(store, str(tmp_path), "mine")
    store.write(SHARD, b"bytes")
    store.write(MANIFEST, b"{}")
    return store


@pytest.mark.parametrize("read", [lambda s: s.read(SHARD), lambda s: s.read_ranges(SHARD, [(0, 2)])])
def test_a_bad_block_costs_a_bounded_wait_and_then_its_checkpoint(folder, weather, read) -> None:
    weather.failing["rank-0"] = errno.EIO
    said, ticks, began_s = [], [], time.monotonic()
    store = PatientStore(folder, limit_s=2.0, say=said.append, tick=lambda: ticks.append(1))
    with pytest.raises(CheckpointError, match="the rest of the store can be read"):
        read(store)
    assert time.monotonic() - began_s >= 1.0
    assert ticks and [bool(words) for words in said] == [True, False], "a wait is over when its call is"
    weather.num_failed = 0
    with pytest.raises(CheckpointError):
        read(store)
    assert weather.num_failed == 1, "what was waited for once is not waited for again"
    weather.failing.clear()
    assert read(store)


def test_an_error_of_one_file_that_does_not_pass_is_not_waited_for(folder, weather) -> None:
    weather.failing["rank-0"] = errno.EUCLEAN
    with pytest.raises(CheckpointError, match="needs cleaning"):
        PatientStore(folder, limit_s=600).read(SHARD)
    assert weather.num_failed == 1


def test_a_store_that_does_not_answer_is_never_taken_for_a_damaged_checkpoint(folder, weather) -> None:
    weather.failing |= {"rank-0": errno.EIO, "run_id": errno.EIO}
    said = []
    with pytest.raises(StoreUnreachable):
        PatientStore(folder, limit_s=1.0, say=said.append).read(SHARD)
    assert said[-1] == "", "the wait is over, though in vain"
    since_s: dict[str, float] = {}
    store = FileFaults(folder, store_limit_s=0.0, since_s=since_s)
    with pytest.raises(StoreUnreachable):
        store.read(SHARD)
    assert since_s == {}, "time without an answer does not count"


def test_what_says_whose_store_it_is_is_never_taken_for_damaged(folder, weather) -> None:
    weather.failing["run_id"] = errno.EUCLEAN
    with pytest.raises(StoreUnreachable):
        FileFaults(folder, store_limit_s=0.0).read("run_id")


class Throttled(Exception):
    def __init__(self, status: int, code: str = "") -> None:
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}


@pytest.mark.parametrize(("error", "waits"), [(Throttled(503, "SlowDown"), True), (Throttled(500), False)])
def test_a_store_under_load_says_nothing_about_the_file(error: Exception, waits: bool) -> None:
    told = StoreUnreachable("no", is_passing=may_pass(error))
    told.__cause__ = error
    assert is_told_to_wait(told) is waits


def test_a_launcher_passes_over_a_manifest_that_cannot_be_read(folder, weather, tmp_path) -> None:
    run: RunConfig = config(1, 1, 0, 0)
    place, launch = replace(run.checkpoint, url=str(tmp_path)), replace(run.launch, phase_timeout_s=4.0)
    run = replace(run, checkpoint=place, launch=launch)
    checkpoints = started(folder)
    for iteration in (2, 3):
        checkpoints.commit(manifest(folder, iteration))
    weather.failing["manifests/00000003"] = errno.EIO
    said: list[str] = []
    assert await_committed(run, tmp_path, is_told=lambda: False, say=said.append) == 2
    assert "waiting for it" in said[0]
