"""Drivers of an object store: uploads of checkpoint files and ranged reads, on a local S3 server (adr/0041).

`python -m tests.bench.object_store` starts moto, alternates the drivers that are installed for three rounds
and prints medians. With ARM ENDPOINT it is one round of one driver in a process of its own.
"""

import importlib.util
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import BUCKET, S3_KEYS, wait_for_port
from yatt.checkpoint.store.driver import open_driver
from yatt.checkpoint.store.multipart import write_object
from yatt.checkpoint.store.store import UPLOAD_PART_BYTES

FILES, FILE_BYTES, PIECE_BYTES, AT_ONCE, ROUNDS = 4, 512 << 20, 16 << 20, 4, 3
READ_BYTES, READS = 16 << 20, 32
PART_BYTES = 32 << 20
CONTENT = bytes(range(256)) * (PIECE_BYTES // 256)


def chunks() -> Iterator[bytes]:
    return (CONTENT for _ in range(FILE_BYTES // PIECE_BYTES))


def at_once(work: Callable[[int], object], count: int) -> float:
    began_s = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(work, range(count)))
    return time.monotonic() - began_s


class S3fsFile:
    """s3fs, its own file: one part of a file at a time."""

    def __init__(self, endpoint: str) -> None:
        self._fs, _ = open_driver(f"s3://{BUCKET}/bench", {"endpoint_url": endpoint})

    def write(self, index: int) -> None:
        with self._fs.open(f"{BUCKET}/bench/{index}", "wb", block_size=PART_BYTES) as file:
            for chunk in chunks():
                file.write(chunk)

    def read(self, index: int) -> None:
        path, begin = f"{BUCKET}/bench/{index % FILES}", index // FILES * READ_BYTES
        (data,) = self._fs.cat_ranges([path], [begin], [begin + READ_BYTES], on_error="raise")
        assert len(data) == READ_BYTES


class S3fsParts(S3fsFile):
    """s3fs, `yatt.checkpoint.store.multipart`: several parts of a file at once."""

    def write(self, index: int) -> None:
        write_object(self._fs, f"{BUCKET}/bench/{index}", chunks(), UPLOAD_PART_BYTES)


class Obstore:
    """obstore's fsspec adapter."""

    def __init__(self, endpoint: str) -> None:
        from obstore.fsspec import FsspecStore

        config = {"endpoint": endpoint, "virtual_hosted_style_request": False}
        self._fs = FsspecStore("s3", config=config, client_options={"allow_http": True, "timeout": "600s"})

    def write(self, index: int) -> None:
        with self._fs.open(f"{BUCKET}/bench/{index}", "wb", buffer_size=PART_BYTES) as file:
            for chunk in chunks():
                file.write(chunk)

    read = S3fsFile.read


class Boto3:
    """boto3 upload_fileobj from memory, and get_object."""

    def __init__(self, endpoint: str) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self._client = boto3.client("s3", endpoint_url=endpoint, config=Config(max_pool_connections=40))
        self._config = TransferConfig(multipart_chunksize=PART_BYTES)
        self._file = Path("/dev/shm/yatt-bench-object")
        with self._file.open("wb") as file:
            for chunk in chunks():
                file.write(chunk)

    def write(self, index: int) -> None:
        self._client.upload_file(str(self._file), BUCKET, f"bench/{index}", Config=self._config)

    def read(self, index: int) -> None:
        begin = index // FILES * READ_BYTES
        given = self._client.get_object(
            Bucket=BUCKET, Key=f"bench/{index % FILES}", Range=f"bytes={begin}-{begin + READ_BYTES - 1}"
        )
        assert len(given["Body"].read()) == READ_BYTES


ARMS = {"s3fs file": S3fsFile, "s3fs parts": S3fsParts, "obstore.fsspec": Obstore, "boto3": Boto3}


def arm(name: str, endpoint: str) -> dict[str, float]:
    """One round of one driver."""
    made = ARMS[name](endpoint)
    before_s = cpu_s()
    write_s = at_once(made.write, FILES)
    between_s = cpu_s()
    read_s = at_once(made.read, READS)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "write_s": write_s, "write_cpu_s": between_s - before_s,
        "read_s": read_s, "read_cpu_s": cpu_s() - between_s, "peak_bytes": peak_bytes,
    }  # fmt: skip


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def all_rounds() -> dict[str, dict[str, float]]:
    """Medians of all rounds, by driver."""
    import boto3

    os.environ.update(S3_KEYS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(server, stdout=quiet, stderr=quiet) as process:
        try:
            wait_for_port(port)
            endpoint = f"http://127.0.0.1:{port}"
            boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
            found: dict[str, list[dict[str, float]]] = {}
            for _ in range(ROUNDS):
                for name in ARMS:
                    if name.startswith("obstore") and importlib.util.find_spec("obstore") is None:
                        continue
                    found.setdefault(name, []).append(_in_process(name, endpoint))
        finally:
            process.terminate()
    return {
        name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }


def _in_process(name: str, endpoint: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.object_store", name, endpoint]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    shown: object = arm(*sys.argv[1:]) if len(sys.argv) > 1 else all_rounds()
    sys.stdout.write(json.dumps(shown) + "\n")
