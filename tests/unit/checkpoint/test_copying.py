"""A copied checkpoint is the same checkpoint, whole or absent, in every kind of store."""

import pytest

from tests.conftest import BUCKET
from tests.integration.trainer.conftest import make_model
from tests.killed_store import Killed, KilledStore
from tests.saved_weights import save
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.ownership import claim_store, store_owner
from yatt.checkpoint.commit.verifying import verify_checkpoint
from yatt.checkpoint.convert.copying import copy_to_store
from yatt.checkpoint.store.store import FolderStore, open_store
from yatt.errors import CheckpointError, ConfigError

NAMES = {n: f"manifests/{n:08d}.{1 if n < 3 else 2:06d}.json" for n in (1, 2, 3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama", is_tied=True, num_hidden_layers=1)


@pytest.fixture
def source(tmp_path, model):
    """Iterations 1 and 2 of attempt 1, and 3 of attempt 2, which went on from 2."""
    store = FolderStore(tmp_path / "source")
    claim_store(store, "source", "r1")
    first, second = Checkpoints(store, 1, "r1"), Checkpoints(store, 2, "r1")
    first.adopt(None)
    save(store, model, dp=2, run_id="r1")
    second.adopt(save(store, model, iteration=2, run_id="r1"))
    save(store, model, iteration=3, attempt=2, parent=(2, 1), run_id="r1")
    return Checkpoints(store, 0)


def no_tick(_):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["folder", "memory", "s3"])
def test_copies_in_any_order_are_the_lineage_of_the_source(tmp_path, source, kind, request):
    url, options = str(tmp_path / "copy"), {}
    if kind == "memory":
        url = f"memory://{tmp_path.name}"
    elif kind == "s3":
        url = f"s3://{BUCKET}/{tmp_path.name}"
        options = {"endpoint_url": request.getfixturevalue("s3_endpoint")}
    target = open_store(url, options)
    assert copy_to_store(source, NAMES[3], target, url, no_tick)
    assert Checkpoints(target, 0).newest().name == NAMES[3]
    assert copy_to_store(source, NAMES[1], target, url, no_tick)
    assert not copy_to_store(source, NAMES[1], target, url, no_tick), "it is there already"
    assert store_owner(target) == "r1"
    assert Checkpoints(target, 0).candidates().names == (NAMES[3], NAMES[1])
    for name in (NAMES[3], NAMES[1]):
        assert verify_checkpoint(Checkpoints(target, 0, "r1"), name, no_tick).damages == ()
        assert target.read(name) == source.store.read(name)


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_a_copy_killed_at_any_call_is_whole_or_absent_and_can_be_repeated(
    tmp_path, source, is_late, monkeypatch
):
    monkeypatch.setattr("yatt.checkpoint.store.streams.THREADS", 1)
    at = 0
    while True:
        target = FolderStore(tmp_path / f"copy-{at}")
        try:
            copy_to_store(source, NAMES[1], KilledStore(target, at, is_late=is_late), "copy", no_tick)
        except Killed:
            found = Checkpoints(target, 0).candidates().names
            assert all(
                verify_checkpoint(Checkpoints(target, 0), name, no_tick).damages == () for name in found
            )
            copy_to_store(source, NAMES[1], target, "copy", no_tick)
            assert verify_checkpoint(Checkpoints(target, 0), NAMES[1], no_tick).damages == ()
            assert Checkpoints(target, 0).newest().name == NAMES[1]
        else:
            break
        at += 1
    assert at > 10


def test_ctrl_c_leaves_no_files(tmp_path, source):
    def tick(_):
        raise KeyboardInterrupt

    target = FolderStore(tmp_path / "copy")
    with pytest.raises(KeyboardInterrupt):
        copy_to_store(source, NAMES[1], target, "copy", tick)
    assert target.names("global_step_1") == []
    assert target.names("manifests") == []


def test_a_damaged_source_is_not_copied(tmp_path, source):
    file = source.read(NAMES[1]).files[0]
    path = tmp_path / "source" / file.path
    data = bytearray(path.read_bytes())
    data[file.tensors[2].begin] ^= 1
    path.write_bytes(data)
    target = FolderStore(tmp_path / "copy")
    with pytest.raises(
        CheckpointError, match=rf"{file.path}: .* at byte {file.tensors[2].begin} is not what"
    ):
        copy_to_store(source, NAMES[1], target, "copy", no_tick)
    assert target.names("global_step_1") == []
    assert Checkpoints(target, 0).candidates().names == ()


def test_another_runs_store_and_another_history_are_refused(tmp_path, source):
    target = FolderStore(tmp_path / "copy")
    claim_store(target, "copy", "r2")
    with pytest.raises(ConfigError, match="belongs to run r2"):
        copy_to_store(source, NAMES[1], target, "copy", no_tick)
    other = FolderStore(tmp_path / "other")
    claim_store(other, "other", "r1")
    other.create("adopted/000002.json", b'{"iteration":1,"attempt":1}')
    with pytest.raises(CheckpointError, match="other has another record of what attempt 2 resumed from"):
        copy_to_store(source, NAMES[3], other, "other", no_tick)
    assert other.names("global_step_3") == []
