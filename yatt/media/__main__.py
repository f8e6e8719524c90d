"""The media process: ``python -m yatt.media --run RUN --attempt N --worker W --endpoint E --media FOLDER``.

One for each node. The only process that parses bytes of strangers, and the only one with an image library, so
that what they do to it affects no controller, engine or rank. A fault belongs to an item. If an item ends or
stops this process, its controller starts it again (`control.gpus.processes.media_host`); prepared files stay.
"""

import asyncio
import itertools
import logging
import os
import resource
import sys
import warnings
from functools import partial
from pathlib import Path

import zmq

from yatt.adapters.files.patience import exit_code_of, with_retries
from yatt.adapters.machine.memory import data_bytes
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import calling_socket
from yatt.adapters.net.worker_link import WorkerLink
from yatt.adapters.net.worker_loop import serve_until_stopped
from yatt.adapters.processes.log_lines import log_to_stderr
from yatt.adapters.processes.process import leave_notice_to_controller
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.processes.worker_arguments import WorkerArguments, parse_arguments
from yatt.adapters.run_folder.staged import copies_on_node, load_on_node
from yatt.config.schema import RunConfig
from yatt.errors import EXIT_FAILED, ConfigError
from yatt.media.encoding import PictureEncoding
from yatt.media.fetch import MediaSources
from yatt.media.kept import KeptFiles
from yatt.media.making import PictureMaker
from yatt.media.prepare import Preparation, load_preparation
from yatt.media.videos import load_video_preparation
from yatt.paths import RunPaths
from yatt.records import message as m
from yatt.records.media import MOST_ITEMS, media_name

CONTROLLER = "controller"
NUM_THREADS = 8
"""Pictures that are made at the same time: libraries release the interpreter while they decode and resize."""

MOST_STUCK = 4
"""Items over their limit whose threads still run; then this process ends, and another one is started."""

SHARE, MOST_CACHE_BYTES = 32, 4 << 30
"""Default of `media.cache_bytes`: the node's memory through the first, at most the second."""

SLACK_BYTES = 512 << 20
"""Memory beside that of pictures: stacks of threads, and what the allocator holds."""

_LOG = logging.getLogger("yatt.media")


class MediaWorker:
    """Executes the orders of one controller.

    Args:
        timeout_s: longest time of one item.
    """

    def __init__(self, files: KeptFiles, timeout_s: float) -> None:
        self._files, self._timeout_s = files, timeout_s
        self._orders, self._steps = itertools.count(1), itertools.count(1)
        self._room = asyncio.Semaphore(NUM_THREADS)
        self._maker: PictureMaker | None = None
        self._num_stuck = 0
        self.progress = 0
        """A counter that rises with each part of an item that is done."""

        self.stopped = asyncio.Event()
        self.is_worn_out = False
        """Whether it ends because too many threads do not."""

    def attach_maker(self, maker: PictureMaker) -> None:
        """Sets what makes the items."""
        self._maker = maker

    def tick(self) -> None:
        """Counts progress; called in any thread."""
        self.progress = next(self._steps)

    async def handle(self, sender: str, body: m.Message) -> m.Message | None:  # noqa: ARG002
        """Executes one order of the controller."""
        if isinstance(body, m.Stop):
            self.stopped.set()
            return m.Done()
        if isinstance(body, m.PrepareMedia):
            return await self._prepare(body)
        return m.Failed(error=f"{type(body).__name__} is no order for a media process")

    async def _prepare(self, body: m.PrepareMedia) -> m.Message:
        if len(body.items) > MOST_ITEMS:
            return m.Failed(error=f"an order has at most {MOST_ITEMS} media, not {len(body.items)}")
        number = next(self._orders)
        with self._files.order(number):
            made = await asyncio.gather(
                *(self._make(number, index, item) for index, item in enumerate(body.items))
            )
        if self._num_stuck >= MOST_STUCK:
            self.is_worn_out = True
            asyncio.get_running_loop().call_soon(self.stopped.set)  # the answer is sent before
        return m.MediaPrepared(
            items=tuple(each for each in made if isinstance(each, m.PreparedItem)),
            faults=tuple(each for each in made if isinstance(each, m.MediaFault)),
            cache_bytes=self._files.limit_bytes,
        )

    async def _make(self, order: int, index: int, item: m.MediaItem) -> m.PreparedItem | m.MediaFault:
        assert self._maker is not None, "attached before the first order"
        async with self._room:
            call = asyncio.create_task(
                call_in_thread(partial(self._maker.make_item, order, index, item)), name="media-item"
            )
            done, _ = await asyncio.wait({call}, timeout=self._timeout_s)
        self.tick()
        if not done:
            return self._overdue(call, (order, index), item)
        try:
            found: m.PreparedItem | m.MediaFault = call.result()
        except OSError as error:  # no thread is available
            return m.MediaFault(index, f"{media_name(item)} has to wait: {error.strerror}.", waits=True)
        return found

    def _overdue(self, call: "asyncio.Task[object]", key: tuple[int, int], item: m.MediaItem) -> m.MediaFault:
        """Gives up an item. Its thread cannot be ended; it goes on until it is done."""
        assert self._maker is not None, "attached before the first order"
        self._num_stuck += 1
        call.add_done_callback(self._no_longer_stuck)
        is_reading = key in self._maker.reading
        what = "was not read" if is_reading else "was not prepared"
        says = f"{media_name(item)} {what} within {self._timeout_s:g} s (media.timeout_s)."
        return m.MediaFault(key[1], says, waits=is_reading)

    def _no_longer_stuck(self, _: "asyncio.Task[object]") -> None:
        self._num_stuck -= 1


def build_worker(arguments: WorkerArguments, config: RunConfig) -> MediaWorker:
    """Loads the model's processor, takes over files of an earlier process, and limits this process's memory.

    Raises:
        ConfigError: the model has no processor that can be used, or the files' place cannot be.
        OSError: the folder of files cannot be used.
    """
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the libraries warn of metadata that nobody reads
    media, data = config.media, config.data
    limits = media.min_pixels, media.max_pixels
    seeing = [genrm for genrm in config.genrms if genrm.sees != "none"]
    models = {"": config.model.path, **{genrm.name: genrm.model for genrm in seeing if genrm.has_engine}}
    preparations: dict[str, Preparation] = {
        name: load_preparation(Path(model), *limits) for name, model in models.items()
    }
    for genrm in seeing:
        if genrm.api.url:
            preparations[genrm.name] = PictureEncoding(genrm.api.most_pixels, genrm.api.most_bytes)
    files = KeptFiles(Path(arguments.media), media.cache_bytes or default_cache_bytes())
    worker = MediaWorker(files, media.timeout_s)
    where = RunPaths(Path(arguments.run)), arguments.attempt, arguments.node
    copies = with_retries(partial(copies_on_node, *where))
    sources = MediaSources(data.media_root, data.media_store, media.storage_options, media.timeout_s, copies)
    maker = PictureMaker(sources, preparations, files, media.most_pixels, worker.tick)
    video = media.video
    maker.videos = partial(
        load_video_preparation,
        config.model.path,
        video.fps,
        video.max_frames,
        video.min_pixels,
        video.max_pixels,
    )
    worker.attach_maker(maker)
    limit = data_bytes() + maker.memory.size_bytes + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return worker


def default_cache_bytes() -> int:
    """Returns the default of `media.cache_bytes` on this node."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory // SHARE, MOST_CACHE_BYTES)


async def serve(arguments: WorkerArguments, config: RunConfig) -> int:
    """Executes orders until Stop or until the controller has ended; returns the exit code."""
    worker = build_worker(arguments, config)
    context = zmq.Context()
    socket = calling_socket(context, arguments.endpoint, arguments.worker)
    channel = Channel(
        socket,
        attempt=arguments.attempt,
        handler=worker.handle,
        peer=CONTROLLER,
        progress=lambda _: worker.progress,
    )
    try:
        await channel.tell(CONTROLLER, m.Hello(worker=arguments.worker, pid=os.getpid()))
        code = await serve_until_stopped(worker.stopped, channel, arguments.controller)
        return EXIT_FAILED if worker.is_worn_out else code
    finally:
        await channel.close()
        context.term()


def main() -> int:
    """Serves; reports a mistake of the user to the controller and ends the process."""
    leave_notice_to_controller()
    log_to_stderr()
    arguments = parse_arguments("The media process of one node of a yatt run.")
    answer_stack_requests(arguments.run, arguments.worker, arguments.attempt)
    try:
        where = RunPaths(Path(arguments.run)), arguments.attempt, arguments.node
        config = with_retries(partial(load_on_node, *where))
        return asyncio.run(serve(arguments, config))
    except ConfigError as error:
        _LOG.error("cannot start: %s", error)
        link = WorkerLink(arguments.endpoint, worker=arguments.worker, attempt=arguments.attempt)
        code = exit_code_of(error)
        link.send(m.Failed(error=str(error), exit_code=code))
        link.close()
        return code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that do not end are not waited for
