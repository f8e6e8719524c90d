"""The uploader: ``python -m yatt.uploader --run RUN --attempt N --worker NAME --endpoint E``.

Reads the host copies of this node's trainer ranks and writes them to the checkpoint store, while engines hold
the GPUs. It runs with low priority. If it is killed, its controller starts it again and repeats the order; if
the host copies have changed meanwhile, that save fails and training goes on.
"""

import asyncio
import itertools
import logging
import os
import time
from functools import partial
from pathlib import Path

import zmq

from yatt.adapters.files.patience import exit_code_of, with_retries
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import calling_socket
from yatt.adapters.net.worker_loop import serve_until_stopped
from yatt.adapters.node_local.host_segment import Stamp
from yatt.adapters.processes.log_lines import log_to_stderr
from yatt.adapters.processes.process import leave_notice_to_controller
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.processes.worker_arguments import WorkerArguments, parse_arguments
from yatt.adapters.run_folder.staged import load_on_node
from yatt.checkpoint.commit.run_store import Stores
from yatt.checkpoint.commit.writing import Streams
from yatt.config.check import upload_limit
from yatt.config.schema import RunConfig
from yatt.errors import EXIT_FAILED, YattError
from yatt.paths import RunPaths
from yatt.records import message as m
from yatt.uploader.local_files import LocalSaves
from yatt.uploader.upload import Throttle, UploadJob, read_snapshot_plan

CONTROLLER = "controller"
NICENESS = 10
_LOG = logging.getLogger("yatt.uploader")


class Uploader:
    """Executes the orders of one controller: one upload at a time; a new one ends the one before.

    Args:
        stores: the run's checkpoint store.
        local: this node's local files of saves.
        attempt: number of this attempt, as in the stamps of the host copies.
        max_bytes_per_s: limit of this node's uploads; 0: none.
    """

    def __init__(self, stores: Stores, local: LocalSaves, attempt: int, max_bytes_per_s: float) -> None:
        self._stores, self._attempt, self._throttle = stores, attempt, Throttle(max_bytes_per_s)
        self._local = local
        self._job: UploadJob | None = None
        self._uploading, self._detaching = asyncio.Lock(), asyncio.Lock()
        self._steps = itertools.count(1)
        self.progress = 0
        """A counter that rises with each piece that is read."""

        self.stopped = asyncio.Event()

    async def handle(self, sender: str, body: m.Message) -> m.Message | None:  # noqa: ARG002
        """Executes one order of the controller."""
        try:
            match body:
                case m.Stop():
                    self.stopped.set()
                    return m.Done()
                case m.Upload(is_local=True):
                    return await self._save_locally(body)
                case m.Upload():
                    return await self._upload(body)
                case m.Detach():
                    return m.Detached(size_bytes=await self._detach(body.areas))
        except (YattError, OSError) as error:
            _LOG.warning("%s failed: %s", type(body).__name__, error)
            code = exit_code_of(error) if isinstance(error, YattError) else EXIT_FAILED
            return m.Failed(error=str(error), exit_code=code)
        return m.Failed(error=f"{type(body).__name__} is no order for an uploader")

    def tick(self) -> None:
        """Counts progress; called in any thread."""
        self.progress = next(self._steps)

    async def _upload(self, order: m.Upload) -> m.Message:
        if self._job is not None:  # its save has failed on another node, so nobody waits for it
            self._job.cancel()
        async with self._uploading:
            stamp, stems = Stamp(self._attempt, order.iteration), [Path(stem) for stem in order.stems]
            store: Streams = self._stores.of(is_origin=False)
            local = self._local.begin(order, sum(read_snapshot_plan(stem).size_bytes for stem in stems))
            if local is not None:
                store = local.beside(store)
            job = self._job = UploadJob(
                store, order.url, stems, stamp, throttle=self._throttle, tick=self.tick
            )
            try:
                files = await call_in_thread(job.run)
                fault = await call_in_thread(local.close) if local is not None else ""
                busy_s = local.busy_s if local is not None else 0.0
                return m.Uploaded(files=files, local_fault=fault, local_s=busy_s)
            finally:
                if local is not None:
                    local.give_up("the upload has failed")
                self._job = None
                async with self._detaching:
                    job.close()

    async def _save_locally(self, order: m.Upload) -> m.Message:
        """Writes the snapshots to this node's disk only. Does not wait for an upload that is cancelled: the
        store may not answer, and time is short. The host copies change no more."""
        if self._job is not None:
            self._job.cancel()
        began_s, stamp = time.monotonic(), Stamp(self._attempt, order.iteration)
        store = await call_in_thread(partial(self._local.only, order))
        stems = [Path(stem) for stem in order.stems]
        job = UploadJob(store, order.url, stems, stamp, throttle=Throttle(0), tick=self.tick)
        try:
            files = await call_in_thread(job.run)
        finally:
            job.close()
        return m.Uploaded(files=files, local_s=time.monotonic() - began_s)

    async def _detach(self, areas: tuple[str, ...]) -> int:
        async with self._detaching:
            if self._job is None:
                return 0
            return int(await call_in_thread(partial(self._job.detach, areas)))


async def serve(arguments: WorkerArguments, config: RunConfig) -> int:
    """Executes orders until Stop or until the controller has ended; returns the exit code."""
    context, loop = zmq.Context(), asyncio.get_running_loop()
    socket = calling_socket(context, arguments.endpoint, arguments.worker)
    told: set[asyncio.Task[None]] = set()

    def say(error: str) -> None:
        """Reports a wait for the store; called in any thread."""
        loop.call_soon_threadsafe(tell, m.Renew(token=0, turns=0, work=uploader.progress, waits_for=error))

    def tell(body: m.Message) -> None:
        task = loop.create_task(channel.tell(CONTROLLER, body))
        told.add(task)
        task.add_done_callback(told.discard)

    stores = Stores(config, Path(arguments.run), say, lambda: uploader.tick())
    local = LocalSaves(config)
    local.tidy()
    uploader = Uploader(stores, local, arguments.attempt, upload_limit(config))
    channel = Channel(
        socket,
        attempt=arguments.attempt,
        handler=uploader.handle,
        peer=CONTROLLER,
        progress=lambda _: uploader.progress,
    )
    try:
        await call_in_thread(partial(stores.of, is_origin=False))
        await channel.tell(CONTROLLER, m.Hello(worker=arguments.worker, pid=os.getpid()))
        return await serve_until_stopped(uploader.stopped, channel, arguments.controller)
    finally:
        await channel.close()
        context.term()


def main() -> int:
    """Runs the uploader of one node."""
    leave_notice_to_controller()
    log_to_stderr()
    os.nice(NICENESS)
    arguments = parse_arguments("The uploader of one node of a yatt run.")
    answer_stack_requests(arguments.run, arguments.worker, arguments.attempt)
    where = RunPaths(Path(arguments.run)), arguments.attempt, arguments.node
    config = with_retries(partial(load_on_node, *where))
    return asyncio.run(serve(arguments, config))


if __name__ == "__main__":
    raise SystemExit(main())
