"""The processes of an evaluation: one node's engines and reward processes, without a trainer.

It uses a controller's components: GPUs go by leases and measured memory to one role after the other, an
engine or reward process that ends is started again, and its requests are repeated
(`yatt.control.components`). Everything lies in one private folder on this machine, which is removed at the
end; if this process is killed, its children end too, and `yatt clean` removes the folder.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from yatt.adapters.files.patience import with_retries
from yatt.adapters.inputs.data_rows import called_columns
from yatt.adapters.inputs.dataset import RowFiles
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.machine.descriptors import raise_soft_limit
from yatt.adapters.machine.nvml import cpus_by_device, visible_devices
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import Socket, listening_socket, roomy_context
from yatt.adapters.node_local import local_folder
from yatt.adapters.processes.process import log_tail
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.config.load import resolved_text
from yatt.config.schema import RunConfig
from yatt.control.components import Components, build_components
from yatt.control.controller import Controller
from yatt.control.gpus.processes import scratch
from yatt.control.gpus.processes.nurseries import NURSERY
from yatt.control.gpus.processes.worker_plan import MEDIA, REWARD
from yatt.control.membership.failure_reports import FailureReports
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.control.rollouts.episodes import Episodes, Sampling
from yatt.control.rollouts.scoring.asking import answered_by
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.errors import EXIT_USER_MISTAKE, ConfigError, WorkerFailed
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths, rows_folder
from yatt.records import cluster as c, message as m

T = TypeVar("T")
ATTEMPT = 1
WORKER_GRACE_S = 3.0
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
ENGINE_MODULE = "yatt.evaluation.engine"
TAIL_LINES = 15
LOG_ENDS = "ends:"
LOOK_S = 0.05


def ending_signals() -> list[signal.Signals]:
    """Returns the signals that end an evaluation: not SIGHUP under nohup."""
    return [s for s in ENDINGS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Gives these signals the handlers again that they had before."""
    before = {number: signal.getsignal(number) for number in ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end this process by an exception in this context, as Ctrl-C does, so that
    folders are removed and other processes are ended."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(f"yatt: ended by {signal.Signals(number).name}")

    with handlers_restored():
        for number in ending_signals():
            if number != signal.SIGINT:
                signal.signal(number, end)
        yield


@contextlib.contextmanager
def private_folder(config: RunConfig) -> Iterator[Path]:
    """Gives a new folder of this process in `launch.scratch_dir`, and removes it at the end.

    Raises:
        ConfigError: it cannot be made.
    """
    root = Path(config.launch.scratch_dir)
    scratch.remove_folders_of_the_dead((root, Path(config.launch.shm_dir)))
    folder = root / local_folder.new_name()
    local_folder.create(folder, {"run": "yatt eval", "host": os.uname().nodename})
    try:
        yield folder
    finally:
        scratch.remove_one(folder)


@contextlib.contextmanager
def folder_of_pictures(node: Node) -> Iterator[None]:
    """Has a folder in `launch.shm_dir` for prepared pictures, if prompts have some.

    Raises:
        ConfigError: it cannot be made.
    """
    if not node.config.data.media_store:
        yield
        return
    local_folder.check_in_memory(Path(node.config.launch.shm_dir), "launch.shm_dir")
    local_folder.create(node.weights_root, {"run": "yatt eval", "host": os.uname().nodename})
    try:
        yield
    finally:
        scratch.remove_one(node.weights_root)


def node_of(config: RunConfig, folder: Path, device: str) -> Node:
    """Returns the one node of an evaluation, and writes the config of its processes.

    Args:
        config: complete; its run folder is replaced by one in `folder`.
        folder: from `private_folder`.
        device: cpu or cuda.

    Raises:
        ConfigError: there are not so many GPUs.
    """
    paths = RunPaths(folder / "run")
    config = replace(
        config,
        run=replace(config.run, dir=str(paths.root)),
        launch=replace(config.launch, device="cuda" if device == "cuda" else "cpu"),
    )
    paths.log(ATTEMPT, "any").parent.mkdir(parents=True, mode=0o700)
    paths.config.write_text(resolved_text(config))
    devices: tuple[str, ...] = ()
    cpus: tuple[frozenset[int], ...] = ()
    if device == "cuda":
        devices = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), config.launch.gpus_per_node)
        cpus = cpus_by_device(devices) if config.launch.bind_workers else ()
    return Node(
        config=config, paths=paths, placement=placement_of(config),
        attempt=ATTEMPT, index=0, host="127.0.0.1",
        device=device, devices=devices, cpus=cpus, local_name=folder.name,
    )  # fmt: skip


class EvaluationController(Controller):
    """A controller whose GenRM clients are answered here, not by a trainer node."""

    def __init__(self, node: Node, parts: Components, judge: Judge) -> None:
        super().__init__(node, parts, None)
        self._own_node, self._judge = node, judge

    async def from_worker(self, sender: str, body: m.Message) -> m.Message | None:
        """Handles a message of one of this node's workers."""
        if isinstance(body, m.Ask):
            return await answered_by(self._judge, self._own_node.config, body)
        return await super().from_worker(sender, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What an evaluation uses while its processes run.

    Attributes:
        use: gives all GPUs to a role, and returns when its engines take requests.
    """

    config: RunConfig
    rows: RowFiles
    episodes: Episodes
    scorer: Scorer
    use: Callable[[str], Awaitable[None]]


class Host:
    """Starts the processes of an evaluation, and ends them. Create it in an event loop.

    Args:
        say: told sentences for the user, such as the end of an engine.
    """

    def __init__(self, node: Node, context: "zmq.Context[Socket]", say: Callable[[str], None]) -> None:
        self._node, self._say = node, say
        self._asked_to_end: set[str] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events = EventLog(attempt=ATTEMPT, node=0, role="controller", sink=self._tell)
        self._reports = FailureReports(self._events, self._failed)
        self._channel = Channel(listening_socket(context, node.endpoint), attempt=ATTEMPT, resend_s=0)
        self._parts = build_components(node, self._channel, Peers(), self._events, self._reports)
        for worker in self._parts.supervisor.workers.values():
            if worker.role == ROLLOUT:
                worker.argv = (ENGINE_MODULE, *worker.argv[1:])

    async def run(self, work: Callable[[Served], Awaitable[T]], sampling: Sampling) -> T:
        """Runs `work` while the processes run; ends all of them then, whatever happens.

        Raises:
            ConfigError: a data file, a tokenizer or a user's function cannot be used.
            WorkerFailed: a process ends again and again.
        """
        parts, channel = self._parts, self._channel
        tasks: list[asyncio.Future[Any]] = []
        try:
            tasks.append(opened := asyncio.ensure_future(self._opened(sampling)))
            served, judge = await self._first(opened, tasks)
            controller = EvaluationController(self._node, parts, judge)
            channel.serve(controller.from_worker, parts.progress.told_to)
            main = asyncio.ensure_future(self._started(controller, work, served))
            tasks = [main, *(
                asyncio.ensure_future(lasting) for lasting in (
                    controller.watch_exits(), parts.arbiter.run(), channel.failure(), self._reports.run(),
                    parts.supervisor.shared_memory.run(),
                )
            )]  # fmt: skip
            return await self._first(main, tasks)
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                await self._close()

    def end(self, error: str) -> None:
        """Ends `run` with WorkerFailed, unless something else has ended it."""
        if not self._failure.done():
            self._failure.set_exception(WorkerFailed(error))
            self._failure.exception()  # retrieved, so that asyncio does not log it

    def check(self) -> None:
        """Raises WorkerFailed if something has ended it, also after `run` had its result."""
        if self._failure.done():
            self._failure.result()

    async def _first(self, main: "asyncio.Future[T]", tasks: list[asyncio.Future[Any]]) -> T:
        """Waits for one of the tasks to end, and returns the result of `main` if that one has."""
        done, _ = await asyncio.wait([*tasks, self._failure], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return main.result()

    async def _close(self) -> None:
        self._asked_to_end |= self._parts.supervisor.workers.keys()
        self._parts.given_weights.close()
        try:
            await self._parts.supervisor.close(WORKER_GRACE_S, only_marked=True)
        finally:  # a second Ctrl-C may cancel the above, and the context waits for open sockets
            await self._channel.close()

    async def _started(
        self, controller: Controller, work: Callable[[Served], Awaitable[T]], served: Served
    ) -> T:
        workers = [w for w in self._parts.supervisor.workers.values() if w.role in (REWARD, MEDIA)]
        await asyncio.gather(*map(controller.first_start, workers))
        return await work(served)

    async def _opened(self, sampling: Sampling) -> tuple[Served, Judge]:
        """Reads data and tokenizers, in a thread: they may be large."""
        config, parts = self._node.config, self._parts
        opened = partial(with_retries, limit_s=config.launch.phase_timeout_s)
        folder = rows_folder(self._node.scratch, is_held_out=True)
        columns = called_columns(config)
        rows = await call_in_thread(
            partial(RowFiles, config.data.val_files, config.data, folder, columns=columns)
        )
        tokenizer = partial(Tokenizer, config.model.path, config.data.template_time)
        call = parts.rewards.call
        judge = await call_in_thread(
            partial(Judge, config, parts.router.complete, parts.router.abort, call, 1, self._judge_waits)
        )
        judge.show_with(parts.prepared.opened_files)
        served = Served(
            config=config, rows=rows, scorer=Scorer(config, judge, call), use=self._use,
            episodes=Episodes(
                self._node, await call_in_thread(partial(opened, tokenizer)), parts.router, call, sampling
            ),
        )  # fmt: skip
        return served, judge

    async def _use(self, role: str) -> None:
        """Gives all GPUs to a role. Processes of other roles end: what they keep would be of no use."""
        arbiter, limit_s = self._parts.arbiter, self._node.config.launch.phase_timeout_s
        for wanted in ("", role):
            for slab in self._node.slabs:
                arbiter.want(slab, wanted)
            await asyncio.gather(*(arbiter.settled(slab, wanted, limit_s) for slab in self._node.slabs))
            if not wanted:
                await self._end_engines(role)

    async def _end_engines(self, but: str) -> None:
        supervisor = self._parts.supervisor
        ended = [w for w in supervisor.workers.values() if w.is_engine and w.role != but and w.is_running]
        self._asked_to_end |= {worker.name for worker in ended}
        for worker in ended:
            supervisor.end(worker)
        while any(worker.is_running for worker in ended):
            await asyncio.sleep(LOOK_S)

    async def _failed(self, report: c.FailureReport) -> None:
        if self._failure.done():
            return
        error = await call_in_thread(partial(self._with_log, report.error))
        kind = ConfigError if report.exit_code == EXIT_USER_MISTAKE else WorkerFailed
        self._failure.set_exception(kind(error))

    def _with_log(self, error: str) -> str:
        """Adds the end of the newest engine's log, since the logs are removed at the end."""
        logs = self._node.paths.log(ATTEMPT, "any").parent
        engines = [path for path in logs.glob("*.log") if not path.name.startswith((REWARD, NURSERY))]
        if LOG_ENDS in error or not engines:
            return error
        newest = max(engines, key=lambda path: path.stat().st_mtime)
        return f"{error}\nThe newest log of an engine {LOG_ENDS}\n{log_tail(newest, TAIL_LINES)}"

    def _judge_waits(self, genrm: str, error: str) -> None:
        self._say(f"GenRM '{genrm}' does not answer ({error}); waiting" if error else f"'{genrm}' answers")

    def _tell(self, line: str) -> None:
        """Tells the user of events that cost time."""
        event = msgspec.json.decode(line)
        name = str(event.get("worker", "")).rpartition(".")[0]
        if event["kind"] == "worker.end" and name not in self._asked_to_end:
            self._say(f"{name} ended: {event['how']}; it is started again")
        elif event["kind"] in ("worker.delay", "worker.failed"):
            self._say(f"{name}: {event['error']}")
        elif event["kind"] == "lease.not_free":
            self._say(f"a GPU's memory is not free: {event['cause']}")


async def run_hosted(
    node: Node, work: Callable[[Served], Awaitable[T]], sampling: Sampling, say: Callable[[str], None]
) -> T:
    """Runs `work` with the processes of an evaluation; see `Host.run`. A signal ends it.

    Raises:
        CancelledError: SIGINT ended it.
        WorkerFailed: SIGTERM or SIGHUP ended it.
    """
    raise_soft_limit()
    context = roomy_context(1)
    host = Host(node, context, say)
    loop, got = asyncio.get_running_loop(), list[signal.Signals]()

    def end(number: signal.Signals) -> None:
        got.append(number)
        if number == signal.SIGINT:
            loop.remove_signal_handler(number)  # a second one ends this process at once
        host.end(f"ended by {number.name}")

    for number in ending_signals():
        loop.add_signal_handler(number, end, number)
    try:
        result = await host.run(work, sampling)
        host.check()  # a signal may come while the processes are ended
        return result
    except WorkerFailed:
        if signal.SIGINT in got:
            raise asyncio.CancelledError from None
        raise
    finally:
        context.term()
