"""A controller of a few lines for tests of worker processes: a server on a real ipc socket, one child."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
import zmq

from tests.runs import HANG_S, environment, popen
from yatt.adapters.net.channel import Channel, Handler
from yatt.adapters.net.curve import listening_socket
from yatt.records import message as m

ATTEMPT, TOKEN = 3, 5


@dataclass
class WorkerServer:
    """What the controller sees of its worker."""

    worker: str
    process: subprocess.Popen
    channel: Channel
    told: asyncio.Queue = field(default_factory=asyncio.Queue)
    beats: list[m.Renew] = field(default_factory=list)

    async def order(self, body: m.Order, limit_s: float = HANG_S, *, token: int = TOKEN) -> m.Message:
        return await self.channel.request(self.worker, body, limit_s, token=token)

    async def tell(self, body: m.Message, *, token: int = TOKEN) -> None:
        await self.channel.tell(self.worker, body, token=token)

    async def next_told(self, limit_s: float = HANG_S) -> m.Message:
        return await asyncio.wait_for(self.told.get(), limit_s)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, HANG_S)


def write_run(folder: Path, sections: dict) -> Path:
    """A run folder with a resolved config."""
    run = folder / "run"
    run.mkdir()
    needed = {
        "run": {"dir": str(run)},
        "data": {"train_files": ["unused.jsonl"], "max_prompt_tokens": 32},
        "model": {"path": str(folder)},
        "optimizer": {"lr": 0.001},
        "trainer": {"total_iterations": 1, "train_batch_size": 2, "mini_batch_size": 2},
        "rewards": [{"name": "exact", "path": "builtin:exact"}],
        "lease": {"renew_s": 0.2, "ttl_s": 10.0},
    }
    for name, content in sections.items():
        needed[name] = needed.get(name, {}) | content if isinstance(content, dict) else content
    (run / "config.yaml").write_text(yaml.safe_dump(needed))
    return run


@contextlib.asynccontextmanager
async def worker_with_server(
    run: Path, module: str, *more: str, handler: Handler | None = None, worker: str = "worker.1"
) -> AsyncIterator[WorkerServer]:
    """Start `python -m module` and wait for its Hello; end it by its pid afterwards."""
    context = zmq.Context()
    endpoint = f"ipc://{run}/{worker}"
    socket = listening_socket(context, endpoint)
    command = [sys.executable, "-m", module, "--run", str(run), "--attempt", str(ATTEMPT), "--worker", worker]
    log = (run / f"{worker}.log").open("w")
    env = environment() | {"PYTHONPATH": os.environ["PYTHONPATH"]}  # a test may have its own there
    process = popen([*command, "--endpoint", endpoint, "--node", "0", *more], stdout=log, stderr=log, env=env)
    told: asyncio.Queue = asyncio.Queue()
    beats: list[m.Renew] = []

    def hear(sender: str, body: m.Message) -> Awaitable[m.Message | None] | None:
        if isinstance(body, m.Renew):
            beats.append(body)
            return None
        if handler is not None and isinstance(body, m.Ask):
            return handler(sender, body)
        if isinstance(body, m.RewardsLoaded):
            return None
        told.put_nowait(body)
        return None

    server = WorkerServer(worker, process, Channel(socket, attempt=ATTEMPT, handler=hear), told, beats)
    try:
        hello = await server.next_told(HANG_S)
        assert isinstance(hello, m.Hello), f"{hello}\n{(run / f'{worker}.log').read_text()}"
        assert hello.pid == process.pid
        yield server
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait(HANG_S)
        await server.channel.close()
        context.term()
        log.close()
