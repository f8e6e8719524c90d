"""Carries out one evaluation on this machine: a run without training, in a private folder."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from yatt.adapters.files.files import write_atomically
from yatt.adapters.files.segments import SegmentTail
from yatt.adapters.node_local import local_folder
from yatt.adapters.processes.process import log_tail
from yatt.adapters.run_folder.ledger import ENDED, newest_attempt, record_of_attempt
from yatt.config.schema import RunConfig
from yatt.control.gpus.processes import scratch
from yatt.control.gpus.processes.nurseries import NURSERY
from yatt.control.gpus.processes.worker_plan import MEDIA, REWARD
from yatt.core.figures.evaluation import EvalRequest
from yatt.errors import EXIT_FINISHED, EXIT_USER_MISTAKE, ConfigError, StoppedWaiting, WorkerFailed
from yatt.launch.attempt.attempts import Attempts, finished_text
from yatt.launch.attempt.on_this_machine import ENDING, LocalBackend
from yatt.launch.folder.folder import open_folder
from yatt.launch.folder.folder_wait import FolderWait
from yatt.obs.story.story import JudgingNow
from yatt.obs.story.words import evaluated_in_words
from yatt.paths import RunPaths
from yatt.records.events.attempts import AttemptEnded
from yatt.records.events.groups import JudgeAwaited, PromptsEvaluated
from yatt.records.events.log import LoggedEvent, logged_event
from yatt.records.events.processes import NOT_NEEDED, WorkerDelayed, WorkerEnded, WorkerReported, worker_name
from yatt.records.events.slabs import MemoryNotFree

OTHER_LOGS = (REWARD, MEDIA, NURSERY, "node")
"""Beginnings of the names of logs that are of no engine."""

TAIL_LINES = 15
LOG_ENDS = "ends:"


class Reporter(Protocol):
    """Where an evaluation reports to."""

    def progress(self, text: str) -> None:
        """Takes how far it is."""

    def say(self, text: str) -> None:
        """Takes a sentence for the user."""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end this process by an exception in this context, as Ctrl-C does, so that
    folders are removed and other processes are ended."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(ended_text(number))

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}  # under nohup not SIGHUP
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def ended_text(number: int) -> str:
    """Returns what is said of an evaluation that a signal has ended."""
    return f"yatt: ended by {signal.Signals(number).name}"


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


def open_evaluation(config: RunConfig, request: EvalRequest, *, starts_now: bool = True) -> RunPaths:
    """Creates the run folder of an evaluation, or finds it with the same config.

    Raises:
        ConfigError: the folder cannot be used.
    """
    paths = open_folder(config, starts_now=starts_now)
    write_atomically(paths.evaluation, msgspec.json.format(msgspec.json.encode(request), indent=1))
    return paths


def evaluate_here(config: RunConfig, request: EvalRequest, device: str, reporter: Reporter) -> None:
    """Samples and scores all prompts, and writes the result.

    Args:
        config: complete; its run folder is in a private one.
        device: cpu or cuda.

    Raises:
        ConfigError: an input cannot be used.
        KeyboardInterrupt: Ctrl-C ended it; its processes have ended.
        SystemExit: another signal did.
        WorkerFailed: a process ends again and again.
    """
    paths, signals = open_evaluation(config, request), list[int]()
    story = _Story(paths, signals, reporter)
    wait = FolderWait(
        root=paths.root,
        limit_s=config.launch.phase_timeout_s,
        signals=signals,
        ending=ENDING,
        say=partial(_say_unless_over, paths, signals, reporter),
    )
    backend = LocalBackend(config, paths, device, story.show, wait, signals)
    try:
        backend.listen()
        code = Attempts(config, paths, backend, wait, wait.say).run(os.environ)
    except StoppedWaiting:  # a signal came while the disk was full: it is told below
        code = EXIT_FINISHED
    finally:
        backend.close()
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    if signals:
        raise SystemExit(ended_text(signals[0]))
    if code != EXIT_FINISHED:
        attempt = newest_attempt(paths)
        reason = str(record_of_attempt(paths, attempt, ENDED).get("reason", "")) or "it was cut off"
        raise ConfigError(reason) if code == EXIT_USER_MISTAKE else WorkerFailed(with_log(paths, reason))


def _say_unless_over(paths: RunPaths, signals: list[int], reporter: Reporter, text: str) -> None:
    """Passes on what the launcher says, but not that a run is finished, or how one ended that was to end."""
    if not signals and text != finished_text(paths):
        reporter.say(text)


def with_log(paths: RunPaths, error: str) -> str:
    """Adds the end of the newest engine's log, since the logs are removed at the end."""
    logs = paths.log(newest_attempt(paths), "any").parent
    engines = [path for path in logs.glob("*.log") if not path.name.startswith(OTHER_LOGS)]
    if LOG_ENDS in error or not engines:
        return error
    newest = max(engines, key=lambda path: path.stat().st_mtime)
    return f"{error}\nThe newest log of an engine {LOG_ENDS}\n{log_tail(newest, TAIL_LINES)}"


@dataclass(slots=True)
class _Story:
    """Tells the user what events say of progress, and of what costs time."""

    paths: RunPaths
    signals: list[int]
    reporter: Reporter
    ended: int = 0  # the attempt that has ended last: its processes are not started again
    judging: JudgingNow = field(default_factory=JudgingNow)
    _events: SegmentTail[LoggedEvent] = field(init=False)

    def __post_init__(self) -> None:
        self._events = SegmentTail(self.paths.events, logged_event)

    def show(self) -> None:
        """Tells what is new."""
        with contextlib.suppress(OSError):  # a disk that fails costs the evaluation elsewhere
            for events in self._events.batches():
                for logged in events if not self.signals else ():
                    self._take(logged)

    def _take(self, logged: LoggedEvent) -> None:
        say = self.reporter.say
        match logged.event:
            case WorkerEnded(worker=worker, how=how) if how != NOT_NEEDED and logged.attempt > self.ended:
                say(f"{worker_name(worker)} ended: {how}; it is started again")
            case AttemptEnded():
                self.ended = logged.attempt
            case WorkerDelayed(worker=worker, error=error) | WorkerReported(worker=worker, error=error):
                say(f"{worker_name(worker)}: {error}")
            case MemoryNotFree(cause=cause):
                say(f"a GPU's memory is not free: {cause}")
            case JudgeAwaited(genrm=genrm, error=error):
                say(f"GenRM '{genrm}' does not answer ({error}); waiting" if error else f"'{genrm}' answers")
            case PromptsEvaluated(genrms=genrms):
                self.judging.take(logged.event, logged.node)
                key = ", ".join(genrms)
                done, total = self.judging.prompts_evaluated()[key]
                self.reporter.progress(f"{evaluated_in_words(key)}: {done} of {total} prompts")
