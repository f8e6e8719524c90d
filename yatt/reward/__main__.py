"""The reward process of a node: ``python -m yatt.reward --run RUN --epoch N --worker NAME --endpoint E``.

The user's code runs here and nowhere else, so that what it imports, leaks or crashes touches no
controller. Many Score orders run at once: async functions on the event loop, sync ones in threads. A
function that raises, or takes too long, fails its sample with one sentence; the process goes on.
"""

import asyncio
import logging
import os
import sys
from pathlib import Path

import msgspec
import zmq

from yatt.adapters.curve import calling_socket
from yatt.adapters.process import die_with_parent, leave_notice_to_controller
from yatt.adapters.wire import Channel
from yatt.adapters.worker_arguments import WorkerArguments, parse_arguments
from yatt.adapters.worker_link import WorkerLink
from yatt.config.load import load_attempt
from yatt.config.schema import GenRMSection, RunConfig
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, ConfigError, DeadlineExceeded, StaleEpoch
from yatt.paths import RunPaths
from yatt.records import message as m
from yatt.reward.functions import (
    RewardFunction,
    ScoredSample,
    asking_limit_s,
    call_reward,
    load_rewards,
    where_raised,
)
from yatt.reward.genrm_client import CONTROLLER, GenRMClient

MAX_THREADS = 32
PARENT_CHECK_S = 1.0
_SHOWN_CHARACTERS = 60
_LOG = logging.getLogger("yatt.reward")


class RewardWorker:
    """Score orders of one controller."""

    def __init__(self, config: RunConfig, functions: dict[str, RewardFunction]) -> None:
        self._config, self._functions = config, functions
        self._genrms: dict[str, GenRMSection] = {genrm.name: genrm for genrm in config.genrms}
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._channel: Channel | None = None
        self.stopped = asyncio.Event()

    def attach(self, channel: Channel) -> None:
        """The line that GenRM clients ask over."""
        self._channel = channel

    async def handle(self, sender: str, body: m.Message) -> m.Message | None:  # noqa: ARG002
        """One order of the controller."""
        if isinstance(body, m.Stop):
            self.stopped.set()
            return m.Done()
        if not isinstance(body, m.Score):
            return m.Failed(error=f"{type(body).__name__} is no order for a reward process")
        function = self._functions.get(body.reward)
        if function is None:
            known = ", ".join(self._functions) or "none"
            return m.Failed(error=f"no reward function is named {body.reward!r} (known: {known})", user=True)
        return await self._score(function, body)

    async def _score(self, function: RewardFunction, order: m.Score) -> m.Message:
        sample = _sample(order)
        try:
            score, extra = await call_reward(
                function, sample, client=self._client(function), threads=self._threads
            )
        except DeadlineExceeded as error:
            return m.Failed(error=f"{error}, on {_shown(sample)}")
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything; its sample fails
            place = where_raised(error, function.path)
            cause = f"{type(error).__name__}: {error}"
            return m.Failed(error=f"{function.place} failed at {place} on {_shown(sample)}: {cause}")
        return m.Scored(score=score, extra=extra)

    def _client(self, function: RewardFunction) -> GenRMClient | None:
        genrm = self._genrms.get(function.name)
        if genrm is None:
            return None
        assert self._channel is not None, "attached before the first order"
        return GenRMClient(
            self._channel, genrm, run_seed=self._config.run.seed, limit_s=asking_limit_s(self._config)
        )


class _Row(msgspec.Struct, frozen=True):
    data_source: str = ""
    ground_truth: str = ""
    extra_info: object = None
    columns: dict[str, object] = {}


def _sample(order: m.Score) -> ScoredSample:
    row = msgspec.json.decode(order.row, type=_Row)
    return ScoredSample(
        prompt=order.prompt,
        completion=order.completion,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
        row=dict(row.columns),
    )


def _shown(sample: ScoredSample) -> str:
    end = "..." if len(sample.prompt) > _SHOWN_CHARACTERS else ""
    return f"the {sample.data_source} sample with prompt {sample.prompt[:_SHOWN_CHARACTERS]!r}{end}"


async def serve(arguments: WorkerArguments, config: RunConfig, functions: dict[str, RewardFunction]) -> int:
    """Take orders until Stop or until the controller is gone; gives the exit code."""
    context = zmq.Context()
    socket = calling_socket(context, arguments.endpoint, arguments.worker)
    worker = RewardWorker(config, functions)
    channel = Channel(socket, epoch=arguments.epoch, handler=worker.handle, peer=CONTROLLER)
    worker.attach(channel)
    try:
        await channel.tell(CONTROLLER, m.Hello(worker=arguments.worker, pid=os.getpid()))
        return await _until_stopped(worker, channel)
    finally:
        await channel.close()
        context.term()


async def _until_stopped(worker: RewardWorker, channel: Channel) -> int:
    parent = os.getppid()
    stopped = asyncio.create_task(worker.stopped.wait())
    failure = asyncio.create_task(channel.failure())
    try:
        while os.getppid() == parent:
            done, _ = await asyncio.wait(
                {stopped, failure}, timeout=PARENT_CHECK_S, return_when=asyncio.FIRST_COMPLETED
            )
            if stopped in done:
                return EXIT_FINISHED
            if failure in done:
                await failure
    except StaleEpoch as error:
        _LOG.warning("this attempt is over: %s", error)
        return error.exit_code
    finally:
        stopped.cancel()
        failure.cancel()
    return EXIT_FAILED


def main() -> int:
    """Load the functions, then serve; a mistake in them is told to the controller and ends the process."""
    die_with_parent(os.getppid())
    leave_notice_to_controller()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    arguments = parse_arguments("The reward process of one node of a yatt run.")
    try:
        config = load_attempt(RunPaths(Path(arguments.run)), arguments.epoch)
        functions = load_rewards(config)
    except ConfigError as error:
        _LOG.error("cannot start: %s", error)
        link = WorkerLink(arguments.endpoint, worker=arguments.worker, epoch=arguments.epoch)
        link.send(m.Failed(error=str(error), user=True))
        link.close()
        return error.exit_code
    return asyncio.run(serve(arguments, config, functions))


if __name__ == "__main__":
    sys.exit(main())
