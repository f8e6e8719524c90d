"""Damage of every kind is found, and named by file, tensor and byte; nothing else is called damaged."""

import msgspec
import pytest

from tests.integration.trainer.conftest import make_model
from tests.saved_weights import save
from yatt.checkpoint.commit import verifying
from yatt.checkpoint.commit.inventory import stored_checkpoints
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import sealed_manifest
from yatt.checkpoint.commit.verifying import files_of, manifest_bytes, verify_checkpoint
from yatt.checkpoint.store import streams
from yatt.core.attempts.checkpoint_names import manifest_name
from yatt.core.attempts.claims import Commit
from yatt.errors import CheckpointError, StoreUnreachable

NAME = "manifests/00000001.000001.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", is_tied=True, num_hidden_layers=1)


@pytest.fixture
def checkpoints(store, model):
    start = Checkpoints(store, 1)
    start.adopt(None)
    save(store, model, tp=2, dp=2)
    return Checkpoints(store, 0)


def damages(checkpoints):
    return [str(damage) for damage in verify_checkpoint(checkpoints, NAME, lambda _: None).damages]


def change(store, path, at, flip=1):
    data = bytearray(store.read(path))
    data[at] ^= flip
    store.write(path, bytes(data))


@pytest.mark.parametrize("chunk", [1 << 24, 1000, 7])
def test_a_whole_checkpoint_is_whole_and_every_byte_was_read(checkpoints, monkeypatch, chunk):
    if chunk == 7:
        monkeypatch.setattr(verifying, "files_of", lambda manifest: files_of(manifest)[-1:])
    monkeypatch.setattr(streams, "CHUNK_BYTES", chunk)
    seen: list[int] = []
    found = verify_checkpoint(checkpoints, NAME, seen.append)
    assert (found.damages, found.name) == ((), NAME)
    assert max(seen) <= chunk
    if chunk > 7:
        assert sum(seen) == found.size_bytes == manifest_bytes(checkpoints.read(NAME))


@pytest.mark.parametrize("chunk", [1 << 24, 1000])
def test_every_damaged_piece_is_named(store, checkpoints, monkeypatch, chunk):
    monkeypatch.setattr(streams, "CHUNK_BYTES", chunk)
    file = checkpoints.read(NAME).files[1]
    first, last = file.tensors[0], file.tensors[-1]
    change(store, file.path, first.begin)
    change(store, file.path, last.begin + last.size_bytes - 1, 0x80)
    assert damages(checkpoints) == [
        f"{file.path}: {piece.key} at byte {piece.begin} is not what was saved" for piece in (first, last)
    ]


def test_a_damaged_header_and_a_damaged_state_are_named(store, checkpoints):
    manifest = checkpoints.read(NAME)
    change(store, manifest.files[0].path, 20)
    change(store, manifest.nodes[0].path, 3)
    assert damages(checkpoints) == [
        f"{manifest.files[0].path}: bytes outside of its tensors are not what was saved",
        f"{manifest.nodes[0].path}: it is not what was saved",
    ]


def test_missing_short_and_long_files_are_named(store, checkpoints):
    one, two, three, *_ = checkpoints.read(NAME).files
    state = checkpoints.read(NAME).nodes[0]
    store.delete(one.path)
    store.write(two.path, store.read(two.path)[: two.tensors[-1].begin + 1])
    store.write(three.path, store.read(three.path) + b"x")
    store.write(state.path, b"")
    end = two.tensors[-1].begin + 1
    assert damages(checkpoints) == [
        f"{one.path}: is missing",
        f"{two.path}: {two.tensors[-1].key} at byte {end - 1} is cut off: the file ends at {end}",
        f"{three.path}: has {three.size_bytes + 1} bytes instead of {three.size_bytes}",
        f"{state.path}: has 0 bytes instead of {state.size_bytes}",
    ]


def test_a_manifest_that_lists_too_little_and_one_that_is_torn_are_named(store, checkpoints):
    manifest = checkpoints.read(NAME)
    lost = msgspec.structs.replace(manifest, files=manifest.files[1:])
    store.write(NAME, sealed_manifest(lost))
    found = damages(checkpoints)
    assert any("main.embedding.word_embeddings.weight has" in line for line in found)
    assert all(" elements" in line for line in found)
    change(store, NAME, 40)
    (only,) = damages(checkpoints)
    assert only.startswith(f"{NAME}: ")


def test_a_store_that_is_away_is_not_called_damage(store, checkpoints):
    class Away:
        def __getattr__(self, name):
            return getattr(store, name)

        def read_ranges(self, name, ranges):
            raise StoreUnreachable("503", is_passing=True)

    checkpoints.store = Away()
    with pytest.raises(StoreUnreachable):
        damages(checkpoints)


def test_the_first_failure_stops_the_other_threads():
    began, ticks = [], []

    def work(number, tick):
        began.append(number)
        if number == 1:
            raise CheckpointError("torn")
        for _ in range(10_000):
            tick(1)

    with pytest.raises(CheckpointError, match="torn"):
        streams.in_threads(range(100), work, ticks.append, threads=2)
    assert len(began) < 50


def test_the_list_says_what_is_whole_damaged_stale_and_unfinished(store, model):
    first = Checkpoints(store, 1)
    first.adopt(None)
    saved = [save(store, model, iteration=iteration) for iteration in (1, 2, 3)]
    second = Checkpoints(store, 2)
    second.adopt(saved[1])
    save(store, model, iteration=4, attempt=2, parent=(2, 1))
    newest = save(store, model, iteration=5, attempt=2, parent=(2, 1))
    store.delete(newest.files[0].path)
    store.write("global_step_6/000002-abcdabcd/rank-0", b"unfinished")
    entries = stored_checkpoints(Checkpoints(store, 0))
    found = [(e.iteration, e.attempt, e.state, e.is_next) for e in entries]
    assert found == [
        (6, 2, "unfinished", False), (5, 2, "damaged", False), (4, 2, "whole", True), (3, 1, "stale", False),
        (2, 1, "whole", False), (1, 1, "whole", False),
    ]  # fmt: skip
    assert entries[1].fault == f"{newest.files[0].path} is missing"
    assert entries[2].size_bytes == manifest_bytes(Checkpoints(store, 0).read(entries[2].name))


def test_a_checkpoint_that_is_deleted_while_the_list_is_made_is_not_damaged(store, model, monkeypatch):
    checkpoints = Checkpoints(store, 1)
    checkpoints.adopt(None)
    for iteration in (1, 2, 3):
        save(store, model, iteration=iteration)
    reader, read = Checkpoints(store, 0), Checkpoints.read

    def retained(self, name):
        store.delete(manifest_name(Commit(1, 1)))
        return read(self, name)

    monkeypatch.setattr(Checkpoints, "read", retained)
    assert [(entry.iteration, entry.state) for entry in stored_checkpoints(reader)] == [
        (3, "whole"),
        (2, "whole"),
    ]
