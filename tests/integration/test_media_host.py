"""A node's media process under its controller: killed, crashing, hanging, ended by a picture."""

import asyncio
import contextlib
import hashlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.pictures import encoded, picture
from tests.runs import until
from tests.tiny_processors import write_processor
from tests.worker_process import write_run
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import listening_socket
from yatt.adapters.node_local.prepared_media import open_prepared
from yatt.config.load import load_resolved
from yatt.control.components import Components, build_components
from yatt.control.gpus.processes import media_host
from yatt.control.gpus.processes.worker_plan import MEDIA, Worker
from yatt.control.membership.failure_reports import FailureReports
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.core.gpus.placement import placement_of
from yatt.errors import EXIT_USER_MISTAKE
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths
from yatt.records import message as m

FATES = """
import errno, os, signal, sys, time

def fate(event, arguments):
    if event != "open" or not isinstance(arguments[0], str) or "/pictures/" not in arguments[0]:
        return
    name = os.path.basename(arguments[0])
    if name.startswith("crash"):
        signal.raise_signal(signal.SIGSEGV)  # to this thread: it does not go on until another one has died
    if name.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if name.startswith("slow"):
        time.sleep(0.5)
    seen = arguments[0].replace("/pictures/", "/fates/")
    if name.startswith("once") and not os.path.exists(seen):
        os.close(os.open(seen, os.O_CREAT | os.O_WRONLY))
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("stale") and not os.path.exists(seen):
        os.close(os.open(seen, os.O_CREAT | os.O_WRONLY))
        raise OSError(errno.ESTALE, "Stale file handle", arguments[0])

sys.addaudithook(fate)
"""
"""What opening a picture does to the process: as a file that its libraries cannot stand would."""


@dataclass
class Host:
    """A controller's parts that concern media."""

    parts: Components
    node: Node
    events: list[dict] = field(default_factory=list)
    failures: list[tuple[str, int]] = field(default_factory=list)

    @property
    def worker(self) -> Worker:
        return next(w for w in self.parts.supervisor.workers.values() if w.role == MEDIA)

    async def prepare(self, *items: m.MediaItem) -> m.MediaPrepared:
        return await self.parts.media.prepare_media(items)

    def number_of(self, kind: str) -> int:
        return sum(event["kind"] == kind for event in self.events)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="yt-") as name:  # short, for sockets
        (Path(name) / "pictures").mkdir()
        write_processor(Path(name))
        yield Path(name)


def add(folder: Path, name: str, seed: int = 0) -> m.MediaItem:
    data = encoded(picture(96, 64, seed), "PNG")
    (folder / "pictures" / name).write_bytes(data)
    return m.MediaItem(name, hashlib.sha256(data).hexdigest())


@contextlib.asynccontextmanager
async def hosted(folder: Path, **media: object) -> AsyncIterator[Host]:
    sections = {
        "data": {"media_root": str(folder / "pictures")},
        "rollout": {"engine": "vllm"}, "media": {"timeout_s": 20.0, **media},
        "launch": {"scratch_dir": str(folder), "shm_dir": str(folder), "phase_timeout_s": 60.0},
    }  # fmt: skip
    paths = RunPaths(write_run(folder, sections))
    config = load_resolved(paths.config)
    config = replace(config, data=replace(config.data, media_store=str(folder / "store")))
    node = Node(
        config=config, paths=paths, placement=placement_of(config), attempt=1, index=0, host="127.0.0.1",
        device="cpu",
    )  # fmt: skip
    for path in (node.scratch, node.weights_root, paths.log(1, "x").parent):
        path.mkdir(parents=True)
    told: list[dict] = []

    def hear(sender: str, body: m.Message) -> None:
        worker = host.parts.supervisor.by_address(sender)
        if isinstance(body, m.Hello) and worker is not None:
            worker.process.hello.set()
        if isinstance(body, m.Failed):
            host.failures.append((body.error, body.exit_code))

    async def watch_exits() -> None:  # as a controller does
        while True:
            worker, how = await parts.supervisor.exits.get()
            parts.workers.forget(worker, how)
            parts.media.ended(worker, how)

    async def deliver(report) -> None:
        host.failures.append((report.error, report.exit_code))

    context = zmq.Context()
    channel = Channel(listening_socket(context, node.endpoint), attempt=1, handler=hear, resend_s=0)
    sink = lambda line: told.append(msgspec.json.decode(line))  # noqa: E731
    events = EventLog(attempt=1, node=0, role="controller", sink=sink)
    reports = FailureReports(events, deliver)
    parts = build_components(node, channel, Peers(), events, reports)
    host = Host(parts, node, told)
    running = asyncio.gather(watch_exits(), reports.run())
    try:
        await parts.supervisor.start(host.worker)
        yield host
    finally:
        await parts.supervisor.close(1.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await channel.close()
        context.destroy(linger=0)


def play(folder: Path, scene: Callable[[Host], Awaitable[None]], **media: object) -> None:
    async def whole() -> None:
        async with hosted(folder, **media) as host:
            await scene(host)

    asyncio.run(whole())


@pytest.fixture
def with_fates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "fates").mkdir()
    (folder / "fates" / "sitecustomize.py").write_text(FATES)
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'fates'}:{os.environ['PYTHONPATH']}")


def test_a_killed_process_is_started_again_and_nothing_is_made_twice(folder: Path, with_fates: None) -> None:
    """Two processes. Each start of the process imports its
    libraries, for four CPU seconds; cheaper than a whole run, and no part of it can be left out."""
    items = [add(folder, f"{n}.png", n) for n in range(3)]
    slow = [add(folder, f"slow{n}.png", 10 + n) for n in range(12)]

    async def scene(host: Host) -> None:
        first = await host.prepare(*items)
        assert len(first.items) == 3 and not first.faults
        for item in items:
            (folder / "pictures" / item.path).unlink()
        orders = [asyncio.ensure_future(host.prepare(*slow)), asyncio.ensure_future(host.prepare(*slow[:2]))]
        kept = host.node.media_folder
        await until(lambda: len(list(kept.iterdir())) > 4, "a part of the order")
        host.worker.process.child.signal_group(signal.SIGKILL)
        answers = await asyncio.gather(*orders)
        assert [len(answer.items) for answer in answers] == [12, 2] and not answers[0].faults
        assert host.worker.starts == 2
        again = await host.prepare(*items)
        assert again.items == first.items, "they are kept, for their files are gone"
        for each in again.items:
            assert open_prepared(kept, each.digest).grid == (1, 4, 6)

    play(folder, scene)


def test_a_picture_that_ends_the_process_each_time_fails_alone(folder: Path, with_fates: None) -> None:
    """Five processes. Each start of the process imports its
    libraries, for four CPU seconds; cheaper than a whole run, and no part of it can be left out."""
    good = [add(folder, f"{n}.png", n) for n in range(3)]
    crash, once = add(folder, "crash.png", 5), add(folder, "once.png", 6)

    async def scene(host: Host) -> None:
        beside = asyncio.ensure_future(host.prepare(*good))
        answer = await host.prepare(good[0], crash, good[1], once)
        assert [each.index for each in answer.items] == [0, 2, 3], answer
        (fault,) = answer.faults
        assert fault.index == 1 and "crash.png ended the media process each time" in fault.error
        assert "SIGSEGV" in fault.error and not fault.waits
        assert len((await beside).items) == 3, "an order beside it loses nothing"
        assert not host.failures

    play(folder, scene)


def test_a_picture_that_stops_the_process_is_found_by_its_silence(
    folder: Path, with_fates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes. Each start of the process imports its
    libraries, for four CPU seconds; cheaper than a whole run, and no part of it can be left out."""
    for name, value in {"MEDIA_GRACE_S": 2.0, "SUSPECT": 1, "MEDIA_PATIENCE": 1}.items():
        monkeypatch.setattr(media_host, name, value)
    stop, good = add(folder, "stop.png", 5), add(folder, "0.png")

    async def scene(host: Host) -> None:
        answer = await host.prepare(stop, good)
        assert [each.index for each in answer.items] == [1]
        assert "made no progress" in answer.faults[0].error and "stop.png" in answer.faults[0].error
        assert host.number_of("media.kill") == media_host.SUSPECT + media_host.MEDIA_PATIENCE

    play(folder, scene, timeout_s=1.0)


def test_orders_that_crowd_one_another_out_are_served_in_turn(folder: Path) -> None:
    """Each order needs more than half of the room. Each start of the process imports its
    libraries, for four CPU seconds; cheaper than a whole run, and no part of it can be left out."""
    size = 64 + 24 * 3 * 256
    orders = [[add(folder, f"{o}-{n}.png", 10 * o + n) for n in range(3)] for o in range(3)]

    async def scene(host: Host) -> None:
        answers = await asyncio.gather(*(host.prepare(*items) for items in orders))
        assert [len(answer.items) for answer in answers] == [3, 3, 3]
        assert sum(len(answer.faults) for answer in answers) == 0
        larger = await host.prepare(*orders[0], *orders[1])
        assert larger.faults and all("media.cache_bytes" in fault.error for fault in larger.faults)

    play(folder, scene, cache_bytes=4 * size)


def test_a_file_that_cannot_be_read_now_is_tried_again(
    folder: Path, with_fates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale handle passes, a loop does not. Each start of the process imports its
    libraries, for four CPU seconds; cheaper than a whole run, and no part of it can be left out."""
    monkeypatch.setattr(media_host, "WAIT_S", 0.1)
    items = add(folder, "stale.png"), add(folder, "0.png")
    (folder / "pictures" / "loop.png").symlink_to("loop.png")

    async def scene(host: Host) -> None:
        answer = await host.prepare(*items, m.MediaItem("loop.png"))
        assert [each.index for each in answer.items] == [0, 1]
        (fault,) = answer.faults
        assert fault.index == 2 and "loop.png" in fault.error and not fault.waits

    play(folder, scene)
    assert (folder / "fates" / "stale.png").exists()


def test_a_process_that_cannot_start_is_reported_and_not_started_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes. Each start of the process imports its
    libraries, for four CPU seconds; cheaper than a whole run, and no part of it can be left out."""
    monkeypatch.setattr(media_host, "MOST_BROKEN_STARTS", 2)
    (folder / "preprocessor_config.json").unlink()

    async def scene(host: Host) -> None:
        await until(lambda: len(host.failures) > media_host.MOST_BROKEN_STARTS, "a report")
        error, code = host.failures[-1]
        assert "media-n0 cannot start (exit code 2" in error and code == EXIT_USER_MISTAKE
        assert host.worker.starts == media_host.MOST_BROKEN_STARTS

    play(folder, scene)
