"""The checkpoint store goes away between two attempts: the launcher waits for it, and the run goes on."""

import contextlib
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.runs import RunFile, kill, living, rows, start, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


class Road:
    """A port in front of a server. While it is closed nobody listens there, and what was open is cut."""

    def __init__(self, endpoint: str) -> None:
        self._server = (urlsplit(endpoint).hostname, urlsplit(endpoint).port)
        self._listener: socket.socket | None = None
        self._pairs: list[socket.socket] = []
        self.port = 0

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        for each in (self._listener, *self._pairs):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._pairs.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._server)
                self._pairs += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def road(s3_endpoint: str) -> Iterator[Road]:
    road = Road(s3_endpoint)
    road.open()
    yield road
    road.close()


@pytest.fixture
def broken_off(tmp_path: Path, road: Road) -> "Iterator[tuple[RunFile, subprocess.Popen[str], list[str]]]":
    """A run whose store went away, then a trainer rank: its launcher, and what that has said."""
    options = {"endpoint_url": f"http://127.0.0.1:{road.port}", "key": "test", "secret": "test"}
    run = RunFile(tmp_path, {
        "launch": {"nodes": 1},
        "trainer": {"total_iterations": 6},
        "checkpoint": {"url": f"s3://checkpoints/{tmp_path.name}", "storage_options": options},
    })  # fmt: skip
    process = start("run", str(run.write()))
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
    reader.start()
    try:
        events = run.run_dir / "events.jsonl"
        wait_for(
            lambda: [e for e in rows(events) if e["kind"] == "ckpt.commit"], timeout_s=90, what="a commit"
        )
        road.close()
        for pid, module in living(run.run_dir).items():
            if module == "yatt.trainer":
                kill(pid)
        wait_for(
            lambda: [line for line in said if "does not answer" in line],
            timeout_s=90,
            what="the launcher to wait",
        )
        yield run, process, said
    finally:
        process.kill()
        process.wait(timeout=30)
        reader.join(timeout=30)
        process.stdout.close()


def test_a_store_that_comes_back_is_waited_for(road, broken_off) -> None:
    run, process, said = broken_off
    road.open()
    assert process.wait(timeout=150) == 0, said
    assert len([line for line in said if "does not answer" in line]) == 1
    assert len([line for line in said if "the checkpoint store answers again" in line]) == 1
    steps = [row["training/global_step"] for row in rows(run.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, 7))
    assert any("resumed from iteration" in line for line in said), "it did not begin from the start"


def test_a_signal_ends_the_wait(broken_off) -> None:
    run, process, said = broken_off
    process.terminate()
    assert process.wait(timeout=30) == 75, said
    (ended,) = (run.run_dir / "attempts").glob("*/ended.json")
    assert "while the checkpoint store did not answer" in ended.read_text()
