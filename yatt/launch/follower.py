"""Starts and stops the process that sends metrics to wandb. The run never waits for it, except at its end."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from yatt import clock
from yatt.adapters.process import log_tail, spawn
from yatt.config.schema import RunConfig
from yatt.core.exits import describe_exit
from yatt.errors import EXIT_FINISHED
from yatt.paths import RunPaths

END_S = 30.0
POLL_S = 0.05


@dataclass(slots=True)
class Follower:
    """The wandb follower process of one run.

    Attributes:
        say: prints one line for the user; used once, if the follower fails.
    """

    paths: RunPaths
    say: Callable[[str], None]
    process: Any = None
    """The Popen object while the process is supervised, else None."""

    def start(self, config: RunConfig, env: Mapping[str, str]) -> None:
        """Starts the process, unless logging.wandb_mode is disabled. `check` reports its end."""
        if config.logging.wandb_mode == "disabled":
            return
        argv = [sys.executable, "-P", "-m", "yatt.obs.wandb", "--run", str(self.paths.root)]
        quiet = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
        try:
            self.process = spawn(argv, env={**env, **quiet}, log=self.paths.wandb_log)
        except OSError as error:
            self.say(f"wandb: {self.paths.wandb_log}: {error.strerror} (the run continues without it)")

    def check(self) -> None:
        """Reports once if the process ended with an error; the run continues without it."""
        if self.process is None or self.process.poll() is None:
            return
        code, self.process = self.process.returncode, None
        if code != EXIT_FINISHED:
            last = log_tail(self.paths.wandb_log, lines=1) or describe_exit(code)
            self.say(f"wandb: {last} (the run continues without it; log: {self.paths.wandb_log})")

    def end(self, limit_s: float = END_S) -> None:
        """Stops the process once it has logged all metrics; kills its process group after `limit_s`."""
        if self.process is None:
            return
        deadline_s = clock.monotonic_s() + limit_s
        self.process.send_signal(signal.SIGTERM)
        while self.process.poll() is None and clock.monotonic_s() < deadline_s:
            time.sleep(POLL_S)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
            self.say(f"wandb: did not end within {limit_s:g} s and was killed; log: {self.paths.wandb_log}")
        self.check()
