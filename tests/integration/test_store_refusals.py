"""A refusal (403) is never taken for "exists" or "is missing": creating, adopting, claiming and copying raise
it, with a type that tells whether to try again."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.conftest import BUCKET
from tests.store_proxy import Fault, StoreProxy
from yatt.checkpoint.commit.holders import Place, check_held, hold_store
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.commit.ownership import check_owner, claim_store
from yatt.checkpoint.commit.pieces import checksum
from yatt.checkpoint.convert.copying import copy_to_store
from yatt.checkpoint.store.store import FolderStore, Store, open_store
from yatt.checkpoint.store.unfinished import abort_uploads
from yatt.errors import StoreUnreachable, YattError
from yatt.records.shards import StateFile

pytestmark = pytest.mark.filterwarnings("ignore")
ALWAYS = 10**6
DENIED = 403, "AccessDenied"


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProxy]:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with StoreProxy(s3_endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: StoreProxy, tmp_path: Path) -> Store:
    return open_store(f"s3://{BUCKET}/{tmp_path.name}", {"endpoint_url": proxy.endpoint})


def refuse(proxy: StoreProxy, operation: str) -> None:
    proxy.faults.append(Fault("answer", operation, ALWAYS, *DENIED))


def committed(folder: Path) -> tuple[Checkpoints, str]:
    """A store with one checkpoint, and its name."""
    store = FolderStore(folder)
    claim_store(store, "source", "r1")
    checkpoints = Checkpoints(store, 1, "r1")
    checkpoints.adopt(None)
    path, data = f"{checkpoints.prefix(1)}/node-00000.groups", b"groups"
    store.write(path, data)
    manifest = Manifest(
        iteration=1, attempt=1, run_id="r1", config_hash="", files=(), common=msgspec.Raw(b"{}"),
        nodes=(StateFile(path=path, size_bytes=len(data), checksum=checksum(data)),),
    )  # fmt: skip
    checkpoints.commit(manifest)
    return Checkpoints(store, 0), checkpoints.name(manifest)


@pytest.mark.parametrize(
    "operations", ["Create", "Create|HeadObject", "Create|HeadObject|GetObject|List", ".*"]
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_create_that_is_refused_is_no_answer(
    store: Store, proxy: StoreProxy, operations: str, is_there: bool
) -> None:
    if is_there:
        assert store.create("name", b"another's")
    refuse(proxy, operations)
    if is_there and operations == "Create":
        assert not store.create("name", b"mine"), "the name can be seen to have other content"
        return
    with pytest.raises(StoreUnreachable, match=r"AccessDenied|Forbidden|403") as caught:
        store.create("name", b"mine")
    assert not caught.value.is_passing, "another try would not help"
    proxy.faults.clear()
    assert store.create("name", b"mine") != is_there


WORK = {
    "adopt": lambda store: Checkpoints(store, 3, "r1").adopt(None),
    "note_origin": lambda store: Checkpoints(store, 3, "r1").note_origin("manifests/1"),
    "claim": lambda store: claim_store(store, "s3://x", "r1"),
    "hold": lambda store: hold_store(store, "folder", Place("/run", "here"), takes_over=False),
}


@pytest.mark.parametrize("name", WORK)
def test_what_depends_on_a_create_raises_its_refusal(store: Store, proxy: StoreProxy, name: str) -> None:
    refuse(proxy, "Create")
    with pytest.raises(StoreUnreachable) as caught:
        WORK[name](store)
    assert not caught.value.is_passing
    proxy.faults.clear()
    WORK[name](store)


READS = {
    "size": lambda store: store.size("name"),
    "read": lambda store: store.read("name"),
    "names": lambda store: store.names("folder"),
    "delete": lambda store: store.delete("name"),
    "owner": lambda store: check_owner(store, "s3://x", "r1"),
    "held": lambda store: check_held(store, "folder", "r1"),
    "newest": lambda store: Checkpoints(store, 3, "r1").newest(),
    "origin": lambda store: Checkpoints(store, 3, "r1").origin(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_that_is_refused_is_not_an_empty_store(store: Store, proxy: StoreProxy, name: str) -> None:
    refuse(proxy, ".*")
    with pytest.raises(StoreUnreachable) as caught:
        READS[name](store)
    assert not caught.value.is_passing


def test_a_copy_whose_commit_is_refused_leaves_no_files(
    tmp_path: Path, proxy: StoreProxy, store: Store
) -> None:
    source, name = committed(tmp_path / "source")
    refuse(proxy, "Create")
    with pytest.raises(StoreUnreachable):
        copy_to_store(source, name, store, "s3://x", lambda _: None)
    proxy.faults.clear()
    assert not store.names("manifests") and not store.names("")
    assert copy_to_store(source, name, store, "s3://x", lambda _: None)
    refuse(proxy, "HeadObject")
    with pytest.raises(StoreUnreachable):
        copy_to_store(source, name, store, "s3://x", lambda _: None)


def test_unfinished_uploads_that_may_not_be_listed_cost_a_log_line(
    tmp_path: Path, proxy: StoreProxy, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(proxy, ".*")
    assert abort_uploads(f"s3://{BUCKET}/{tmp_path.name}", {"endpoint_url": proxy.endpoint}, before=9) == 0
    assert "unfinished uploads cannot be aborted" in caplog.text


def test_a_folder_that_refuses_is_no_answer_either(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifests").write_text("a file in place of a folder")
    store = FolderStore(tmp_path / "store")
    with pytest.raises((OSError, YattError)):
        store.create("manifests/1.json", b"mine")
    with pytest.raises((OSError, YattError)):
        Checkpoints(FolderStore(tmp_path / "store" / "manifests"), 1, "r1").adopt(None)
