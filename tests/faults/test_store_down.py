"""The checkpoint store goes away, between two attempts or under a save or a load: that costs time."""

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import s3fs
import torch

from tests.conftest import BUCKET
from tests.runs import (
    HANG_S,
    ROOT,
    RunFile,
    command,
    environment,
    held_after,
    kill,
    living,
    rows,
    start,
    wait_for,
)
from tests.shard_files import write_shards
from yatt.adapters.files.patience import is_passing
from yatt.checkpoint.local.shards import FETCH_BYTES, PIECE_BYTES, Shard, read_shards
from yatt.checkpoint.store import store as store_module
from yatt.checkpoint.store.patient import PatientStore
from yatt.checkpoint.store.store import Store, open_store
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.errors import CheckpointError, ConfigError, StoreUnreachable
from yatt.launch.checks.preflight import check_store
from yatt.launch.folder.folder import open_folder
from yatt.launch.resolve.completed import completed_config

pytestmark = pytest.mark.faults


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
        listener, self._listener = self._listener, None
        pairs, self._pairs = self._pairs, []
        for each in (listener, *pairs) if listener else pairs:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def refuse(self) -> None:
        """Answer 503, as a store under load does."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._turn_away, args=(self._listener,), daemon=True).start()

    def _turn_away(self, listener: socket.socket) -> None:
        body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
        head = b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Type: application/xml\r\n"
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, contextlib.suppress(OSError):
                    client.settimeout(HANG_S)
                    client.recv(1 << 16)
                    client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._pairs.append(client)
                server = socket.create_connection(self._server)
                self._pairs.append(server)
                if self._listener is not listener:  # closed meanwhile
                    client.close(), server.close()
                    return
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
    options = {"endpoint_url": f"http://127.0.0.1:{road.port}"}
    run = RunFile(tmp_path, {
        "launch": {"nodes": 1},
        "trainer": {"total_iterations": 6},
        "checkpoint": {"url": f"s3://checkpoints/{tmp_path.name}", "storage_options": options},
    })  # fmt: skip
    hold = held_after(tmp_path, 3 * 16)
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
        hold.unlink()
        yield run, process, said
    finally:
        process.kill()
        process.wait(timeout=HANG_S)
        reader.join(timeout=HANG_S)
        process.stdout.close()


def test_a_store_that_comes_back_is_waited_for(road, broken_off) -> None:
    run, process, said = broken_off
    road.open()
    assert process.wait(timeout=300) == 0, said
    assert len([line for line in said if "does not answer" in line]) == 1
    assert len([line for line in said if "the checkpoint store answers again" in line]) == 1
    steps = [row["training/global_step"] for row in rows(run.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, 7))
    assert any("resumed from iteration" in line for line in said), "it did not begin from the start"


def test_a_signal_ends_the_wait(broken_off) -> None:
    run, process, said = broken_off
    process.terminate()
    assert process.wait(timeout=HANG_S) == 75, said
    (ended,) = (run.run_dir / "attempts").glob("*/ended.json")
    assert "killed by SIGKILL" in ended.read_text(), "why the attempt ended; the start was stopped later"
    wait_for(
        lambda: any("stopped by a signal; `yatt resume` resumes" in line for line in said),
        what="the launcher's last word",
    )  # fmt: skip


DOWN_S = 4.0


class Interruption:
    """Takes the road away at the n-th tick, and gives it back some seconds later."""

    def __init__(self, road: Road, *, at: int, answers_503: bool) -> None:
        self._road, self._at, self._answers_503 = road, at, answers_503
        self.num_ticks = 0
        self._timer = threading.Timer(DOWN_S, self._end)

    def __call__(self) -> None:
        self.num_ticks += 1
        if self.num_ticks == self._at:
            self._road.close()
            if self._answers_503:
                self._road.refuse()
            self._timer.start()

    def _end(self) -> None:
        if self._answers_503:
            self._road.close()
        self._road.open()

    def join(self) -> None:
        assert self._timer.ident is not None, "the store was never away"
        self._timer.join()


def impatient_options(road: Road) -> dict:
    """A driver that does not hide what it meets for long."""
    retries = {"config_kwargs": {"retries": {"max_attempts": 1}}}
    return {"endpoint_url": f"http://127.0.0.1:{road.port}", **retries}


def patient_s3(tmp_path: Path, road: Road, *, limit_s: float = 60.0) -> Store:
    options = impatient_options(road)
    return PatientStore(open_store(f"s3://{BUCKET}/{tmp_path.name}", options), limit_s=limit_s)


@pytest.mark.parametrize("answers_503", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_shards_are_whole_though_the_store_went_away_under_the_save_and_under_the_load(
    tmp_path: Path, road: Road, monkeypatch, answers_503: bool
) -> None:
    monkeypatch.setattr(store_module, "UPLOAD_PART_BYTES", 5 << 20)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # so that the driver does not hide it
    store = patient_s3(tmp_path, road)
    whole = torch.arange(5 * PIECE_BYTES // 4, dtype=torch.float32).view(5, -1)
    shard = Shard(key="w", global_shape=tuple(whole.shape), offset=(0, 0), tensor=whole)
    saving = Interruption(road, at=2, answers_503=answers_503)
    file = write_shards(store, "p/rank-0", [shard], saving)
    saving.join()
    assert saving.num_ticks > 5, "the stream was begun anew"
    assert len(file.tensors) == 5, "each piece is named once"
    loading = Interruption(road, at=1, answers_503=answers_503)
    assert whole.nbytes > FETCH_BYTES, "more than one call is needed"
    got = torch.empty_like(whole)
    read_shards(store, [file], [Shard(**{**_fields(shard), "tensor": got})], loading)
    loading.join()
    assert torch.equal(got, whole)


def _fields(shard: Shard) -> dict:
    return {name: getattr(shard, name) for name in ("key", "global_shape", "offset")}


@pytest.mark.filterwarnings("ignore")
def test_what_a_store_refuses_for_good_is_not_waited_for(tmp_path: Path, road: Road) -> None:
    options, said = {"endpoint_url": f"http://127.0.0.1:{road.port}"}, list[str]()
    elsewhere = PatientStore(open_store("s3://no-such-bucket/run", options), limit_s=3600, say=said.append)
    with pytest.raises(StoreUnreachable) as caught:
        elsewhere.write("x", b"-")
    assert not is_passing(caught.value)
    here = PatientStore(open_store(f"s3://{BUCKET}/{tmp_path.name}", options), limit_s=3600, say=said.append)
    with pytest.raises(CheckpointError):
        here.read("nowhere")
    assert said == [], "nobody waits"


@pytest.mark.filterwarnings("ignore")
def test_patience_with_a_store_ends_at_its_limit(tmp_path: Path, road: Road) -> None:
    store = patient_s3(tmp_path, road, limit_s=2.0)
    road.close()
    with pytest.raises(StoreUnreachable) as caught:
        store.read("x")
    assert is_passing(caught.value)


WEATHER = ROOT / "tests" / "soak" / "weather"


@pytest.mark.parametrize(("fails", "who"), [("error rank-", "uploader"), ("error node-", "node0")])
def test_a_folder_that_fails_under_a_run_costs_time_and_no_attempt(
    tmp_path: Path, fails: str, who: str
) -> None:
    run = RunFile(tmp_path, {
        "launch": {"nodes": 2}, "trainer": {"total_iterations": 8},
        "checkpoint": {"url": str(tmp_path / "store")},
    })  # fmt: skip
    hold = held_after(tmp_path, 3 * 8)
    weather, env = tmp_path / "weather", environment()
    env["PYTHONPATH"] = f"{WEATHER}:{env['PYTHONPATH']}"
    env |= {"YATT_SOAK_RUN": str(tmp_path / "store"), "YATT_SOAK_WEATHER": str(weather)}
    process = subprocess.Popen(
        command("run", str(run.write())), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        _fail_under(run, hold, away=lambda: weather.write_text(fails), back=lambda: os.unlink(weather))
        said, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    _finished_in_one_attempt(run, process, said)
    assert any(told.startswith(who) for told in _waiters(run)), said


def test_an_object_store_that_is_away_under_a_run_costs_time_and_no_attempt(
    tmp_path: Path, road: Road, monkeypatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # so that the driver does not hide it for long
    options = {"endpoint_url": f"http://127.0.0.1:{road.port}"}
    run = RunFile(tmp_path, {
        "launch": {"nodes": 1}, "trainer": {"total_iterations": 8},
        "checkpoint": {"url": f"s3://checkpoints/{tmp_path.name}", "storage_options": options},
    })  # fmt: skip
    hold = held_after(tmp_path, 3 * 16)
    process = start("run", str(run.write()))
    try:
        _fail_under(run, hold, away=road.close, back=road.open)
        said, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    _finished_in_one_attempt(run, process, said)


def _fail_under(run: RunFile, hold: Path, *, away, back) -> None:
    """Take the store away as soon as there is a commit, until somebody waits for it. The run stands still in
    its fourth iteration until then."""

    def events(kind: str) -> list:
        return [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == kind]

    wait_for(lambda: events("ckpt.commit"), timeout_s=120, what="a commit")
    away()
    wait_for(lambda: [e for e in events("store.wait") if e["error"]], what="somebody to wait for the store")
    back()
    hold.unlink()


def _finished_in_one_attempt(run: RunFile, process: "subprocess.Popen[str]", said: str) -> None:
    assert process.returncode == 0, said
    assert [path.name for path in (run.run_dir / "attempts").iterdir()] == ["000001"], said
    steps = [row["training/global_step"] for row in rows(run.run_dir / "metrics.jsonl")]
    assert steps == list(range(1, 9))
    logs = "".join(p.read_text() for p in (run.run_dir / "attempts" / "000001" / "logs").iterdir())
    assert "the checkpoint store fails" in logs
    assert "the checkpoint store answers again" in logs
    assert " waits for the checkpoint store: " in said
    assert "no process waits for the checkpoint store now" in said


def _waiters(run: RunFile) -> set[str]:
    """Who told of a wait; each told of its end as well."""
    waits = [event for event in rows(run.run_dir / "events.jsonl") if event["kind"] == "store.wait"]
    begun = {event["who"] for event in waits if event["error"]}
    assert {event["who"] for event in waits if not event["error"]} == begun
    return begun


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_started_again_while_its_store_is_away_and_a_new_one_is_not(
    tmp_path: Path, road: Road, monkeypatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)

    def config_in(folder: Path) -> RunConfig:
        options = {"endpoint_url": f"http://127.0.0.1:{road.port}"}
        url = f"s3://checkpoints/{tmp_path.name}-{folder.name}"
        run = RunFile(folder, {"checkpoint": {"url": url, "storage_options": options}})
        return completed_config(load_run_config([run.write()], []))

    known = config_in(tmp_path / "known")
    open_folder(known)
    road.close()
    check_store(known)
    assert open_folder(completed_config(known)).config.exists()
    new = config_in(tmp_path / "new")
    with pytest.raises(ConfigError, match="cannot be used from this machine"):
        check_store(new)
    with pytest.raises(StoreUnreachable):
        open_folder(new)
    assert not (tmp_path / "new" / "run").exists()
