"""A reward process: ``python -m yatt.reward --run RUN --attempt N --worker NAME --endpoint E``.

The user's code runs only here, and verdicts are parsed here, so that its imports, leaks and crashes do not
affect a controller. A node has several such processes; its controller kills one when a call in it takes too
long (`control.rollouts.scoring.reward_pool`). A synchronous function has a process for itself, asynchronous
functions share one. This process enforces their limits, and reports calls to the controller that continue
after their cancellation. A function that raises fails its sample with one sentence; the process continues.
"""

import asyncio
import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq

from yatt.adapters.files.patience import exit_code_of, is_passing, with_retries
from yatt.adapters.inputs.dataset import Row, RowReader
from yatt.adapters.inputs.user_module import where_raised
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import calling_socket
from yatt.adapters.net.worker_link import WorkerLink
from yatt.adapters.net.worker_loop import serve_until_stopped
from yatt.adapters.processes.log_lines import log_to_stderr
from yatt.adapters.processes.process import leave_notice_to_controller
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.processes.worker_arguments import WorkerArguments, parse_arguments
from yatt.adapters.run_folder.staged import load_on_node
from yatt.config.schema import GenRMSection, RunConfig, VerdictSection
from yatt.errors import (
    EXIT_USER_MISTAKE,
    ConfigError,
    DeadlineExceeded,
    WorkerFailed,
    words_of,
)
from yatt.judging.reading import parse_ranking, parse_values, parse_verdict, verdict_place
from yatt.paths import RunPaths, rows_folder
from yatt.records import message as m
from yatt.records.episode import ENVIRONMENT
from yatt.reward.environment import Episode, StepAnswer, call_step, keep_images, load_environment
from yatt.reward.functions import (
    CallStuck,
    RewardFunction,
    ScoredSample,
    call_function,
    call_reward,
    load_rewards,
    messages_of,
)
from yatt.reward.genrm_client import CONTROLLER, GenRMClient
from yatt.reward.results import encodable_text
from yatt.reward.ways import load_ways

T = TypeVar("T")
ROW_S = 0.5
"""Longest time to read a data row; the controller repeats the request after it."""

MOST_READING = 64
"""Maximum number of concurrent reads, each in a thread; others wait."""

MOST_HUNG = 256
"""Maximum number of reads that have not ended; beyond it, reads are refused until some end."""

_SHOWN_CHARACTERS = 60
_LOG = logging.getLogger("yatt.reward")


class RewardWorker:
    """Executes the Score orders of one controller.

    Args:
        scratch: the node's scratch folder, with the controller's copies of parquet files.
    """

    def __init__(self, config: RunConfig, functions: dict[str, RewardFunction], scratch: Path) -> None:
        self._config, self._functions = config, functions
        self._genrms: dict[str, GenRMSection] = {genrm.name: genrm for genrm in config.genrms}
        self._rows = {
            is_held_out: RowReader(files, config.data, rows_folder(scratch, is_held_out=is_held_out))
            for is_held_out, files in ((False, config.data.train_files), (True, config.data.val_files))
        }
        self._channel: Channel | None = None
        self._stuck: set[asyncio.Task[Any]] = set()
        self._reading: set[object] = set()
        self._room = asyncio.Semaphore(MOST_READING)
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = asyncio.Event()

    def attach(self, channel: Channel) -> None:
        """Sets the channel for requests of GenRM clients."""
        self._channel = channel

    async def handle(self, sender: str, body: m.Message) -> m.Message | None:  # noqa: ARG002
        """Executes one order of the controller."""
        if isinstance(body, m.Stop):
            self.stopped.set()
            return m.Done()
        if isinstance(body, m.Step):
            return await self._step(self._functions[ENVIRONMENT], body)
        if isinstance(body, m.JudgeGroup):
            return await self._judge(self._functions[body.reward], body)
        if not isinstance(body, m.Score | m.ScoreMany):
            return m.Failed(error=f"{type(body).__name__} is no order for a reward process")
        if isinstance(body, m.Score) and (genrm := self._genrms.get(body.reward)) and genrm.template:
            return read_verdict(body, genrm.verdict)
        function = self._functions.get(body.reward)
        if function is None:
            known = ", ".join(self._functions) or "none"
            return m.Failed(
                error=f"no reward function is named {body.reward!r} (known: {known})",
                exit_code=EXIT_USER_MISTAKE,
            )
        return await self._score(function, body)

    async def _step(self, function: RewardFunction, order: m.Step) -> m.Message:
        function = replace(function, limit_factor=order.limit_factor)
        try:
            row = await self._row(order)
        except WorkerFailed as error:
            return m.Failed(error=str(error), waits=is_passing(error))
        episode = Episode(
            prompt=order.prompt,
            turns=order.turns,
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.raw.get("extra_info"),
            row=row.raw,
            kwargs=function.kwargs,
        )
        shown = _shown(row.data_source, order.prompt)
        answer = await self._result(function, shown, partial(call_step, function, episode))
        if answer is None or isinstance(answer, m.Failed):
            return answer or m.Stepped(is_end=True)
        media = await self._result(function, shown, partial(self._kept, answer))
        if isinstance(media, m.Failed):
            return media
        return m.Stepped(observation=encodable_text(answer.text), media=media)

    async def _kept(self, answer: StepAnswer) -> "tuple[m.MediaRef, ...] | m.Failed":
        """The references to an answer's pictures, which are written first. A fault of the store, or of this
        machine, is none of the function's."""
        if not answer.images:
            return ()
        try:
            kept: tuple[m.MediaRef, ...] = await call_in_thread(partial(keep_images, answer, self._config))
            return kept
        except OSError as error:
            says = f"a picture of the environment cannot be kept in {self._config.data.media_store}: {error}"
            return m.Failed(error=says, waits=is_passing(error))

    async def _judge(self, function: RewardFunction, order: m.JudgeGroup) -> m.Message:
        try:
            row = await self._row(order)
        except WorkerFailed as error:
            return m.Failed(error=str(error), waits=is_passing(error))
        arguments = {"payload": order.payload, "row": row.raw}
        shown = _shown(row.data_source, str(row.prompt))
        found = await self._result(function, shown, partial(call_function, function, arguments, None))
        return found if isinstance(found, m.Failed) else m.GroupJudged(payload=found)

    async def _score(self, function: RewardFunction, order: m.Score | m.ScoreMany) -> m.Message:
        client = self._client(function)
        function = replace(function, limit_factor=order.limit_factor)
        items = (order,) if isinstance(order, m.Score) else order.items
        try:
            distinct = {item.row: item for item in items}  # a group has one row
            found = await asyncio.gather(*map(self._row, distinct.values()))
        except WorkerFailed as error:  # a row that cannot be read
            return m.Failed(error=str(error), waits=is_passing(error))
        rows = dict(zip(distinct, found, strict=True))
        samples = [self._sample(item, rows[item.row]) for item in items]
        answer = await self._answer(function, samples, client, is_one=isinstance(order, m.Score))
        return client.failure if client is not None and client.failure is not None else answer

    async def _answer(
        self,
        function: RewardFunction,
        samples: list[ScoredSample],
        client: GenRMClient | None,
        *,
        is_one: bool,
    ) -> m.Message:
        shown = _shown(samples[0].data_source, samples[0].prompt)
        if len(samples) > 1:
            shown += f" and {len(samples) - 1} more"
        found = await self._result(function, shown, partial(call_reward, function, samples, client=client))
        if isinstance(found, m.Failed):
            return found
        asked = client.asked if client else 0
        scores = tuple(
            m.Scored(
                score=each.score or 0.0,
                extra=each.extra,
                asked=asked,
                applies=each.score is not None,
                pred=each.pred,
            )
            for each in found
        )
        return scores[0] if is_one else m.ScoredMany(scores=scores)

    async def _result(
        self, function: RewardFunction, shown: str, call: Callable[[], Awaitable[T]]
    ) -> "T | m.Failed":
        """Returns the call's result, or why the function has none.

        Args:
            shown: names the sample in messages.
        """
        try:
            return await call()
        except DeadlineExceeded as error:
            if isinstance(error, CallStuck):
                self._tell_stuck(error)
            return m.Failed(error=f"{error}, on {shown}", exit_code=EXIT_USER_MISTAKE, overran=True)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            place = where_raised(error, function.path)
            says = f"{function.place} failed at {place} on {shown}: {words_of(error)}"
            trace = "".join(traceback.format_exception(error))
            return m.Failed(
                error=encodable_text(says), trace=encodable_text(trace), exit_code=EXIT_USER_MISTAKE
            )

    def _tell_stuck(self, error: CallStuck) -> None:
        """Reports to the controller how many calls continue; in a task, so that the answer is sent first."""
        self._stuck.add(error.task)
        error.task.add_done_callback(self._stuck.discard)
        assert self._channel is not None, "attached before the first order"
        body = m.RewardsStuck(calls=len(self._stuck), limit_s=error.limit_s)
        task = asyncio.create_task(self._channel.tell(CONTROLLER, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _sample(self, order: m.Score, row: Row) -> ScoredSample:
        return ScoredSample(
            prompt=order.prompt,
            completion=order.completion,
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.raw.get("extra_info"),
            row=row.raw,
            facts={
                "finish_reason": order.finish_reason,
                "num_prompt_tokens": order.num_prompt_tokens,
                "num_completion_tokens": order.num_completion_tokens,
                "max_response_tokens": self._config.rollout.max_response_tokens,
            }
            | ({"turns": messages_of(order.turns)} if order.turns else {}),
            turns=order.turns,
        )

    async def _row(self, order: m.Score | m.Step | m.JudgeGroup) -> Row:
        """Reads the data row with one bounded try, because it uses the call's time and other calls wait.

        Raises:
            WorkerFailed: it cannot be read; the cause is a passing error if a later try may succeed.
        """
        path = self._rows[order.is_held_out].path(order.row)
        try:
            async with self._room:
                if len(self._reading) >= MOST_HUNG:
                    raise OSError(errno.EAGAIN, f"{MOST_HUNG} reads hang")
                self._reading.add(mark := object())
                async with asyncio.timeout(ROW_S):
                    row: Row = await call_in_thread(partial(self._read, order, mark))
                return row
        except TimeoutError:
            raise WorkerFailed(f"{path}: a row was not read within {ROW_S:g} s") from OSError(
                errno.EAGAIN, ""
            )
        except OSError as error:
            raise WorkerFailed(f"{path}: a row cannot be read: {error}") from error

    def _read(self, order: m.Score | m.Step | m.JudgeGroup, mark: object) -> Row:
        try:
            return self._rows[order.is_held_out].read(order.row, limit_s=0.0)
        finally:
            self._reading.discard(mark)

    def _client(self, function: RewardFunction) -> GenRMClient | None:
        genrm = self._genrms.get(function.name)
        if genrm is None:
            return None
        assert self._channel is not None, "attached before the first order"
        limit_s = self._config.rollout.request_timeout_s + (genrm.api.outage_s if genrm.api.url else 0.0)
        return GenRMClient(self._channel, genrm, run_seed=self._config.run.seed, limit_s=limit_s)


def read_verdict(order: m.Score, verdict: VerdictSection) -> m.Message:
    """Parses the score, the ranking or the criteria's values in a GenRM's text; Failed without one."""
    text = order.completion
    if order.criteria:
        values = parse_values(text, verdict, order.criteria)
        return _no_verdict() if values is None else m.Scored(score=0.0, extra=values)
    if order.num_ranked:
        ranking = parse_ranking(text, verdict, order.num_ranked)
        return _no_verdict() if ranking is None else m.Scored(score=0.0, ranking=ranking)
    score = parse_verdict(text, verdict)
    if score is None:
        return _no_verdict()
    return m.Scored(score=score, at=verdict_place(text, verdict) if verdict.read == "soft" else 0)


def _no_verdict() -> m.Failed:
    return m.Failed(error="no verdict", exit_code=EXIT_USER_MISTAKE)


def _is_cancelled() -> bool:
    """Whether this process cancelled the task; a function may also raise CancelledError itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _shown(data_source: str, prompt: str) -> str:
    end = "..." if len(prompt) > _SHOWN_CHARACTERS else ""
    return f"the {data_source} sample with prompt {prompt[:_SHOWN_CHARACTERS]!r}{end}"


async def serve(arguments: WorkerArguments, config: RunConfig, functions: dict[str, RewardFunction]) -> int:
    """Executes orders until Stop or until the controller has ended; returns the exit code."""
    context = zmq.Context()
    socket = calling_socket(context, arguments.endpoint, arguments.worker)
    scratch = Path(arguments.endpoint.removeprefix("ipc://")).parent
    worker = RewardWorker(config, functions, scratch)
    channel = Channel(
        socket,
        attempt=arguments.attempt,
        handler=worker.handle,
        peer=CONTROLLER,
        progress=lambda _: int(1000 * time.monotonic()),  # the loop runs; each call has its own limit
    )
    worker.attach(channel)
    try:
        names = tuple(f.name for f in functions.values() if f.is_async)
        await channel.tell(CONTROLLER, m.RewardsLoaded(asynchronous=names))
        await channel.tell(CONTROLLER, m.Hello(worker=arguments.worker, pid=os.getpid()))
        return await serve_until_stopped(worker.stopped, channel, arguments.controller)
    finally:
        await channel.close()
        context.term()


def main() -> int:
    """Loads the functions, then serves; reports a mistake in them to the controller and ends the process."""
    leave_notice_to_controller()
    log_to_stderr()
    arguments = parse_arguments("The reward process of one node of a yatt run.")
    answer_stack_requests(arguments.run, arguments.worker, arguments.attempt)
    try:
        where = RunPaths(Path(arguments.run)), arguments.attempt, arguments.node
        config = with_retries(partial(load_on_node, *where))
        functions = with_retries(partial(load_rewards, config)) | with_retries(partial(load_ways, config))
        if config.environment.path:
            functions[ENVIRONMENT] = with_retries(partial(load_environment, config.environment))
    except ConfigError as error:
        _LOG.error("cannot start: %s", error)
        link = WorkerLink(arguments.endpoint, worker=arguments.worker, attempt=arguments.attempt)
        code = exit_code_of(error)
        link.send(m.Failed(error=str(error), exit_code=code))
        link.close()
        return code
    return asyncio.run(serve(arguments, config, functions))


if __name__ == "__main__":
    sys.exit(main())
