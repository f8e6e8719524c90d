"""Shared by all tests: a clean environment, and no child process left behind."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from yatt.engine.environment import prepare

# Engine libraries read the environment once, at import, and any test may be the first to import them.
prepare(device="cpu", threads=1)


def children_of(pid: int) -> set[int]:
    """Living direct children, by the kernel's own list."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.fixture(autouse=True)
def no_child_left_behind() -> Iterator[None]:
    before = children_of(os.getpid())
    yield
    left = children_of(os.getpid()) - before
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left}
    helpers = (b"resource_tracker", b"multiprocessing.spawn", b"torch._inductor")
    assert not [c for c in commands.values() if not any(h in c for h in helpers)], commands


BUCKET = "checkpoints"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A real S3 API on a free port of this machine, with one bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=BUCKET)
    yield endpoint
    server.stop()
