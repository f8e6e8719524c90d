"""A media process with a controller of a few lines, for benchmarks."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import zmq

from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import listening_socket
from yatt.records import message as m

ATTEMPT, WORKER, LIMIT_S = 1, "media-n0", 120.0


class MediaServer:
    """Sends orders to one media process."""

    def __init__(self, channel: Channel, process: "subprocess.Popen[bytes]") -> None:
        self._channel, self.pid = channel, process.pid

    async def prepare(self, items: tuple[m.MediaItem, ...]) -> m.MediaPrepared:
        """Has pictures prepared; asks again for those that have no room beside other orders."""
        while True:
            answer = await self._channel.request(WORKER, m.PrepareMedia(items=items), LIMIT_S)
            assert isinstance(answer, m.MediaPrepared), answer
            if not answer.faults:
                return answer
            assert all(fault.is_crowded for fault in answer.faults), answer.faults

    @property
    def cpu_s(self) -> float:
        """Processor time of the process, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def media_server(run: Path, kept: Path) -> AsyncIterator[MediaServer]:
    """Starts the process, and ends it by Stop.

    Args:
        kept: folder of prepared files.
    """
    context, endpoint, begun = zmq.Context(), f"ipc://{run}/{os.getpid()}", asyncio.Event()

    def hear(_: str, body: m.Message) -> None:
        if isinstance(body, m.Hello):
            begun.set()

    channel = Channel(listening_socket(context, endpoint), attempt=ATTEMPT, handler=hear)
    argv = [
        sys.executable, "-m", "yatt.media", "--run", str(run), "--attempt", str(ATTEMPT), "--worker", WORKER,
        "--endpoint", endpoint, "--node", "0", "--media", str(kept),
    ]  # fmt: skip
    process = subprocess.Popen(argv, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        await asyncio.wait_for(begun.wait(), LIMIT_S)
        yield MediaServer(channel, process)
        await channel.request(WORKER, m.Stop(), LIMIT_S)
    finally:
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        process.kill()
        process.wait()
        await channel.close()
        context.term()
