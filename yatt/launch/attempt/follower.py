"""Starts and stops the processes that send metrics to trackers. The run never waits for them, except at its
end."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yatt import clock
from yatt.adapters.files.files import make_within
from yatt.adapters.processes.process import log_tail, spawn
from yatt.config.schema import RunConfig
from yatt.config.sections.operation import WANDB, tracker_name
from yatt.core.attempts.exits import describe_exit
from yatt.errors import EXIT_FINISHED, YattError
from yatt.paths import RunPaths

END_S = 30.0
POLL_S = 0.05
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


@dataclass(slots=True)
class Follower:
    """The process that sends a run's metrics to one tracker.

    Attributes:
        tracker: its entry in `logging.trackers`, or wandb.
        say: prints one line for the user; used once, if the follower fails.
    """

    tracker: str
    paths: RunPaths
    say: Callable[[str], None]
    process: Any = None
    """The Popen object while the process is supervised, else None."""

    is_asked: bool = False
    """Whether it was asked to end; before that, any end is a failure."""

    def start(self, env: Mapping[str, str]) -> None:
        """Starts the process; `check` reports its end."""
        root = str(self.paths.root)
        argv = [
            sys.executable,
            "-P",
            "-m",
            "yatt.obs.trackers.follow",
            "--run",
            root,
            "--tracker",
            self.tracker,
        ]
        try:
            make_within(self.paths.root, self._log.parent)
            self.process = spawn(argv, env={**env, **QUIET}, log=self._log)
        except (OSError, YattError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self._tell(f"{self._log}: {why} (the run continues without it)")

    def check(self) -> None:
        """Reports once if the process ended with an error; the run continues without it."""
        if self.process is None or self.process.poll() is None:
            return
        code, self.process = self.process.returncode, None
        if code != EXIT_FINISHED or not self.is_asked:
            last = log_tail(self._log, lines=1) or describe_exit(code)
            self._tell(f"{last} (the run continues without it; log: {self._log})")

    def ask_to_end(self) -> None:
        """Asks the process to log what is left and to end."""
        self.is_asked = True
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)

    def end(self, deadline_s: float, limit_s: float) -> None:
        """Waits until the process has ended; kills its process group at the deadline."""
        if self.process is None:
            return
        while self.process.poll() is None and clock.monotonic_s() < deadline_s:
            time.sleep(POLL_S)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
            self._tell(f"did not end within {limit_s:g} s and was killed; log: {self._log}")
        self.check()

    @property
    def _log(self) -> Path:
        return self.paths.tracker_log(tracker_name(self.tracker))

    def _tell(self, text: str) -> None:
        self.say(f"{tracker_name(self.tracker)}: {text}")


@dataclass(slots=True)
class Followers:
    """The follower processes of one run, one for each tracker."""

    paths: RunPaths
    say: Callable[[str], None]
    each: list[Follower] = field(default_factory=list)

    def start(self, config: RunConfig, env: Mapping[str, str]) -> None:
        """Starts a process for each tracker of the config."""
        self.each = [Follower(tracker, self.paths, self.say) for tracker in _trackers(config)]
        for follower in self.each:
            follower.start(env)

    @property
    def processes(self) -> list[Any]:
        """The Popen objects of the supervised processes."""
        return [follower.process for follower in self.each if follower.process is not None]

    def check(self) -> None:
        """Reports each process once that ended with an error."""
        for follower in self.each:
            follower.check()

    def end(self, limit_s: float = END_S) -> None:
        """Ends all processes once they have logged all metrics; kills those that take longer than
        `limit_s`."""
        deadline_s = clock.monotonic_s() + limit_s
        for follower in self.each:
            follower.ask_to_end()
        for follower in self.each:
            follower.end(deadline_s, limit_s)


def _trackers(config: RunConfig) -> Iterator[str]:
    if config.logging.wandb_mode != "disabled":
        yield WANDB
    yield from config.logging.trackers
