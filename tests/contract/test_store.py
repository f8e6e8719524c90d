"""One suite for every place checkpoints can lie: a folder, a memory filesystem, a local S3 server."""

import threading

import pytest
import torch
import xxhash

from tests.conftest import BUCKET
from tests.runs import HANG_S
from tests.shard_files import write_shards
from yatt.checkpoint.local.shards import Shard, read_shards
from yatt.checkpoint.store import store as store_module
from yatt.checkpoint.store.store import open_store
from yatt.errors import CheckpointError, ConfigError, StoreUnreachable


@pytest.fixture(params=["folder", "file-url", "memory", "s3"])
def store(request, tmp_path):
    if request.param == "folder":
        return open_store(str(tmp_path / "run"), {})
    if request.param == "file-url":
        return open_store(f"file://{tmp_path}/run", {})
    if request.param == "memory":
        return open_store(f"memory://{tmp_path.name}", {})
    options = {"endpoint_url": request.getfixturevalue("s3_endpoint")}
    return open_store(f"s3://{BUCKET}/{tmp_path.name}", options)


pytestmark = pytest.mark.filterwarnings("ignore")


def test_what_is_written_is_read_whole_and_replaced_whole(store):
    store.write("a/b/one", b"first")
    store.write("a/b/one", b"second")
    assert store.read("a/b/one") == b"second"
    assert store.size("a/b/one") == 6
    assert store.names("a/b") == ["one"]


def test_what_is_not_there_is_said_not_guessed(store):
    assert store.size("nowhere/at-all") is None
    assert store.names("nowhere") == []
    store.delete("nowhere/at-all")
    store.delete_folder("nowhere")
    with pytest.raises(CheckpointError, match="nowhere/at-all"):
        store.read("nowhere/at-all")


def test_a_name_is_created_once_and_the_same_content_again_is_no_loss(store):
    assert store.create("manifests/1", b"mine")
    assert store.create("manifests/1", b"mine")
    assert not store.create("manifests/1", b"theirs")
    assert store.read("manifests/1") == b"mine"


def test_a_folder_goes_with_all_in_it_and_nothing_else(store):
    for name in ("x/1", "x/y/2", "xx/3"):
        store.write(name, b"-")
    store.delete_folder("x")
    assert (store.size("x/1"), store.size("x/y/2"), store.size("xx/3")) == (None, None, 1)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "x/..", "../y", "{outside}", "x//1", "x/", "x/../../y", "x\0", "y" * 600]
)
def test_no_name_leads_out_of_the_store(store, name, tmp_path):
    """Nothing of the machine is named here: a store without the rule would delete it."""
    (tmp_path / "outside").mkdir()
    name = name.format(outside=tmp_path / "outside")
    for kept in ("x/1", "y"):
        store.write(kept, b"-")
    calls = (
        lambda: store.delete_folder(name), lambda: store.delete(name), lambda: store.write(name, b"mine"),
        lambda: store.create(name, b"mine"), lambda: store.read(name), lambda: store.size(name),
        lambda: store.read_ranges(name, [(0, 1)]), lambda: store.write_stream(name, lambda: iter([b"mine"])),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(CheckpointError, match="is not a name in a checkpoint store"):
            call()
    assert store.names("") == ["x", "y"] and store.names("x") == ["1"]
    assert (tmp_path / "outside").is_dir()


def test_a_note_that_is_too_long_is_not_read(store):
    store.write("note", b"a" * 100)
    assert store.read("note", most_bytes=100) == b"a" * 100
    with pytest.raises(CheckpointError, match="has 100 bytes; no such file of yatt has more than 99"):
        store.read("note", most_bytes=99)
    assert not store.create("note", b"a" * 99)


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_store_that_refuses_is_not_taken_for_an_empty_one(store, s3_endpoint):
    store.write("manifests/1", b"mine")
    options = {"endpoint_url": s3_endpoint}
    elsewhere = open_store("s3://no-such-bucket/run", options)
    with pytest.raises(StoreUnreachable, match="manifests/1"):
        elsewhere.create("manifests/1", b"mine")
    nobody = open_store(f"s3://{BUCKET}/run", {**options, "endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(StoreUnreachable, match="run/x"):
        nobody.read("x")


def test_a_stream_is_stored_whole_with_its_size_and_checksum(store):
    chunks = [b"a" * 1000, memoryview(b"bc"), b"d" * 7]
    written = store.write_stream("a/stream", lambda: iter(chunks))
    whole = b"".join(bytes(chunk) for chunk in chunks)
    assert (written.size_bytes, written.checksum) == (1009, xxhash.xxh3_128_hexdigest(whole))
    assert store.read("a/stream") == whole
    assert store.read_ranges("a/stream", [(999, 1003), (0, 2), (1005, 2000)]) == [b"abcd", b"aa", b"d" * 4]
    with pytest.raises(CheckpointError, match="nowhere"):
        store.read_ranges("nowhere", [(0, 1)])


def test_a_stream_that_breaks_off_leaves_nothing(store, monkeypatch):
    monkeypatch.setattr(store_module, "UPLOAD_PART_BYTES", 5 << 20)

    def chunks():
        for _ in range(3):
            yield b"x" * (4 << 20)
        raise ValueError("the tensor is gone")

    with pytest.raises(ValueError, match="the tensor is gone"):
        store.write_stream("a/torn", chunks)
    assert store.size("a/torn") is None
    assert store.names("a") == []


def test_a_long_stream_is_uploaded_in_parts(store, monkeypatch):
    monkeypatch.setattr(store_module, "UPLOAD_PART_BYTES", 5 << 20)
    chunk = bytes(range(256)) * 4096
    written = store.write_stream("a/long", lambda: (chunk for _ in range(12)))
    assert store.size("a/long") == written.size_bytes == 12 << 20
    assert store.read_ranges("a/long", [((5 << 20) - 2, (5 << 20) + 2)]) == [bytes([254, 255, 0, 1])]


def test_shards_go_in_and_come_out(store):
    whole = torch.arange(12.0).view(3, 4)
    halves = [
        Shard(key="w", global_shape=(3, 4), offset=(0, at), tensor=whole[:, at : at + 2]) for at in (0, 2)
    ]
    files = [write_shards(store, f"p/rank-{rank}", [shard]) for rank, shard in enumerate(halves)]
    wanted = [Shard(key="w", global_shape=(3, 4), offset=(0, 0), tensor=torch.empty(3, 4))]
    read_shards(store, files, wanted)
    assert torch.equal(wanted[0].tensor, whole)


@pytest.mark.parametrize("store", ["folder", "s3"], indirect=True)
def test_an_exclusive_create_has_one_winner(store):
    outcomes: dict[int, bool] = {}
    gate = threading.Barrier(4)

    def write(number):
        gate.wait(HANG_S)
        outcomes[number] = store.create("manifests/race", f"writer {number}".encode())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    winners = [number for number, won in outcomes.items() if won]
    assert len(outcomes) == 4
    assert len(winners) == 1
    assert store.read("manifests/race") == f"writer {winners[0]}".encode()


def test_an_unknown_url_is_the_users_mistake():
    with pytest.raises(ConfigError, match=r"checkpoint\.url nosuch://x"):
        open_store("nosuch://x", {})


@pytest.mark.parametrize("kind", ["memory://", "s3"])
@pytest.mark.parametrize("mine", ["run[1]", "run*", "run?"])
def test_a_stores_name_is_no_pattern(request, tmp_path, kind, mine):
    options = {"endpoint_url": request.getfixturevalue("s3_endpoint")} if kind == "s3" else {}
    base = f"s3://{BUCKET}/{tmp_path.name}" if kind == "s3" else f"memory://{tmp_path.name}"
    own, other = (open_store(f"{base}/{name}", options) for name in (mine, "run1"))
    for each in (own, other):
        each.write("x/y/1", b"-")
    own.delete_folder("x")
    assert (own.size("x/y/1"), other.size("x/y/1")) == (None, 1)


@pytest.mark.parametrize("url", ["{0}", "file://{0}", "local://{0}"])
def test_a_folder_is_guarded_whatever_its_url_is(tmp_path, url):
    (tmp_path / "store").mkdir()
    (tmp_path / "diary").write_text("private")
    (tmp_path / "store" / "run_id").symlink_to(tmp_path / "diary")
    store = open_store(url.format(tmp_path / "store"), {})
    with pytest.raises(CheckpointError, match="is a link, and none is followed"):
        store.read("run_id")
    store.delete("run_id")
    assert store.names("") == [] and (tmp_path / "diary").exists()


@pytest.mark.parametrize("url", ["new/store", "file://new/store"])
def test_a_relative_folder_is_made(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    open_store(url, {}).write("a/b", b"-")
    assert (tmp_path / "new" / "store" / "a" / "b").exists()
