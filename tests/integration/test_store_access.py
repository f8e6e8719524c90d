"""The store is tried out before a run starts: each mistake is one line, exit code 2, and leaves nothing."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.conftest import BUCKET
from tests.runs import RunFile, yatt
from tests.store_proxy import Fault, StoreProxy
from yatt.checkpoint.store.access import check_access
from yatt.checkpoint.store.store import FolderStore, open_store
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.launch.checks.preflight import check_store
from yatt.launch.folder.folder import open_folder
from yatt.launch.resolve.completed import completed_config

pytestmark = pytest.mark.filterwarnings("ignore")
ALWAYS = 10**6


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProxy]:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with StoreProxy(s3_endpoint) as proxy:
        yield proxy


def config_of(folder: Path, endpoint: str, url: str = "", **options: Any) -> RunConfig:
    checkpoint = {
        "url": url or f"s3://{BUCKET}/{folder.name}", "stall_s": 20.0,
        "storage_options": {"endpoint_url": endpoint, **options},
    }  # fmt: skip
    return completed_config(load_run_config([RunFile(folder, {"checkpoint": checkpoint}).write()], []))


def fault_in(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_store(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def keys_in(endpoint: str, folder: Path) -> set[str]:
    client = boto3.client("s3", endpoint_url=endpoint)
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{folder.name}/")
    return {entry["Key"] for entry in listed.get("Contents", ())}


def test_a_store_that_allows_everything_passes_and_keeps_nothing(tmp_path: Path, proxy: StoreProxy) -> None:
    check_store(config_of(tmp_path, proxy.endpoint))
    assert not keys_in(proxy.server, tmp_path)
    assert proxy.count("Create") == 2 and proxy.count("DeleteObject") == 1


REFUSALS = {
    "wrong key": ("HeadObject|GetObject|List|Create", 403, "InvalidAccessKeyId", "Check the credentials"),
    "wrong secret": ("GetObject|Create", 403, "SignatureDoesNotMatch", "Check the credentials"),
    "expired": ("Create", 403, "ExpiredToken", "create is refused.*credentials have expired"),
    "no write": ("Create", 403, "AccessDenied", "create is refused.*s3:PutObject"),
    "no delete": ("DeleteObject", 403, "AccessDenied", "delete is refused.*s3:DeleteObject"),
    "no list": ("List", 403, "AccessDenied", "s3:ListBucket"),
    "no condition": ("Create", 501, "NotImplemented", "If-None-Match"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_refused_is_named_with_its_cure(tmp_path: Path, proxy: StoreProxy, kind: str) -> None:
    operation, status, code, says = REFUSALS[kind]
    proxy.faults.append(Fault("answer", operation, ALWAYS, status, code))
    told = fault_in(config_of(tmp_path, proxy.endpoint))
    assert re.search(says, told), told
    proxy.faults.clear()
    check_store(config_of(tmp_path, proxy.endpoint))


def test_a_missing_bucket_and_a_missing_profile_are_named(tmp_path: Path, proxy: StoreProxy) -> None:
    told = fault_in(config_of(tmp_path, proxy.endpoint, "s3://no-such-bucket/run"))
    assert "Create the bucket" in told, told
    told = fault_in(config_of(tmp_path, proxy.endpoint, profile="nobody"))
    assert "nobody" in told and "Check the credentials" in told, told


def test_a_store_without_conditional_create_is_refused(tmp_path: Path, proxy: StoreProxy) -> None:
    proxy.drops_conditions = True
    told = fault_in(config_of(tmp_path, proxy.endpoint))
    assert "a second conditional create of the same name succeeded" in told
    assert not keys_in(proxy.server, tmp_path)


def test_a_new_run_names_an_endpoint_that_nobody_answers_and_a_known_one_waits(
    tmp_path: Path, proxy: StoreProxy
) -> None:
    known = config_of(tmp_path / "known", proxy.endpoint)
    open_folder(known)
    proxy.away()
    check_store(known)
    assert "cannot be used from this machine" in fault_in(config_of(tmp_path / "new", proxy.endpoint))
    proxy.back()
    proxy.faults.append(Fault("answer", times=ALWAYS))
    check_store(known)


def test_the_command_tells_it_in_one_line_before_anything_is_made(tmp_path: Path, proxy: StoreProxy) -> None:
    proxy.faults.append(Fault("answer", "Create", ALWAYS, 403, "AccessDenied"))
    checkpoint = {
        "url": f"s3://{BUCKET}/{tmp_path.name}",
        "storage_options": {"endpoint_url": proxy.endpoint},
    }
    run = RunFile(tmp_path, {"checkpoint": checkpoint})
    done = yatt("run", str(run.write()))
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "checkpoint.url" in line]
    assert "s3:PutObject" in line and "Traceback" not in done.stderr
    assert not run.run_dir.exists()


class NoLinks(FolderStore):
    """A folder that lets a second writer replace a name."""

    def create(self, name: str, data: bytes) -> bool:
        self.write(name, data)
        return True


def test_write_access_to_a_folder_store_is_tried_before_the_start(tmp_path: Path) -> None:
    check_access(open_store(str(tmp_path), {}), str(tmp_path))
    with pytest.raises(ConfigError, match="a second conditional create"):
        check_access(NoLinks(tmp_path), str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_store_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be made" in fault_in(config_of(tmp_path, "unused", str(tmp_path / "file" / "store")))
