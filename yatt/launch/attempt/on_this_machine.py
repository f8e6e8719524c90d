"""Attempts on this machine: one controller per virtual node, each a child of this process.

The children end when the launcher dies (parent-death signal).
"""

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from yatt import clock
from yatt.adapters.files.patience import with_retries
from yatt.adapters.machine.nvml import visible_devices
from yatt.adapters.processes.orphans import adopt_orphans, end_orphans
from yatt.adapters.processes.process import Identity, log_tail, open_log, spawn_to
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.run_folder.ledger import STOP, record_of_attempt
from yatt.config.check import node_gpus
from yatt.config.schema import RunConfig
from yatt.control.gpus.processes import scratch
from yatt.core.attempts.lives import Lives
from yatt.core.attempts.outcome import AttemptFacts, Outcome, outcome_of
from yatt.core.gpus.placement import placement_of
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_WILL_CONTINUE, YattError
from yatt.launch.attempt.follower import Followers
from yatt.launch.folder.folder_wait import FolderWait
from yatt.obs.story.events import reason_of_end
from yatt.paths import RunPaths

POLL_S = 0.1
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP})
"""Signals that stop a run after saving. SIGHUP: the terminal was closed."""

END_TOGETHER_S = 15.0
"""Time limit for the other controllers after the first one of a trainer node has ended."""

ORPHANS_S = 3.0
"""Time limit for ending the processes left by workers of a killed controller."""

LATER_START_S = 3.0
"""Longest wait for the start of a controller's later life: other controllers are watched meanwhile."""

STOPS = "stopping: the work is saved first; a second signal (Ctrl-C) ends the run without"
ENDS = "ending without a save"
STOPPED = "stopped by a signal; `yatt resume` resumes"


@dataclass(slots=True)
class LocalBackend:
    """Runs the attempts of one `yatt run`.

    Attributes:
        show: called often while an attempt runs, to update the console.
        signals: received signals of `ENDING`; the second one stops the run without saving.
        owns_orphans: whether every orphan process belongs to this run.
    """

    config: RunConfig
    paths: RunPaths
    device: str
    show: Callable[[], None]
    wait: FolderWait
    signals: list[int]
    absent: frozenset[int] = frozenset()
    submission: str = field(default_factory=partial(secrets.token_hex, 4))
    owns_orphans: bool = False
    _before: dict[int, Any] = field(default_factory=dict)

    def listen(self) -> None:
        """Installs the signal handlers, and makes this process the parent of orphans."""
        answer_stack_requests(self.paths.root, "launcher")
        self.owns_orphans = adopt_orphans()
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                self._before[number] = signal.signal(number, self._received)

    def close(self) -> None:
        """Gives the signals back to whoever had them: a program may call `yatt.run` and go on."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _received(self, number: int, _frame: object) -> None:
        """Records a signal. A second one stops the run without saving; a second SIGHUP is ignored, because
        kernel and shell both send it when a terminal is closed."""
        if number != signal.SIGHUP or not self.signals:
            self.signals.append(number)

    def told(self) -> str:
        """See `yatt.launch.attempt.attempts.Backend`, as for all methods below."""
        return STOPPED if self.signals else ""

    def is_warned(self) -> bool:
        """Whether a signal came; every signal ends this start."""
        return bool(self.signals)

    def superseded(self, *, has_begun: bool) -> str:  # noqa: ARG002 - the protocol's
        """Returns '': on this machine only users start runs."""
        return ""

    def about(self) -> dict[str, Any]:
        """Launcher identity, so that `yatt status` can tell whether it is alive."""
        mine = Identity.of(os.getpid())
        return {"launcher": asdict(mine) if mine else {}}

    def carry_out(self, attempt: int, followers: Followers) -> Outcome:
        """Starts the controllers, forwards the first signal to the leader, and waits for their end."""
        children = [self._start(attempt, index) for index in range(self.config.launch.nodes)]
        lives = {
            index: Lives(began_s=clock.monotonic_s())
            for index in range(len(children))
            if index not in self._trainer_nodes
        }
        told = 0
        deadline_s: float | None = None
        while any(child.poll() is None for child in children):
            self.show()
            followers.check()
            if len(self.signals) > told:
                self._pass_on(children, told)
                told = len(self.signals)
                self.wait.num_heeded = int(self.config.trains)  # only a save is worth the wait
            is_over = any(children[index].poll() is not None for index in self._trainer_nodes)
            if deadline_s is None and is_over:
                deadline_s = clock.monotonic_s() + END_TOGETHER_S
            if deadline_s is None and not told:
                self._restart(attempt, children, lives, followers)
            if (deadline_s is not None and clock.monotonic_s() > deadline_s) or told > 1:
                _kill(children)
            time.sleep(POLL_S)
        self.show()
        self._tidy(attempt, children, lives, followers)
        ended = {index: child.returncode for index, child in enumerate(children)}
        return outcome_of(self.wait(partial(self._seen, attempt, ended, is_told=told > 0)))

    def _pass_on(self, children: list[Any], told: int) -> None:
        """Passes a signal on. An evaluation has nothing to save, and ends at once.

        Args:
            told: number of signals that were passed on before.
        """
        running = [child for child in children if child.poll() is None]
        if not self.config.trains:
            for child in running:
                os.kill(child.pid, signal.SIGUSR1)
            return
        self.wait.say(STOPS if not told else ENDS)
        if children[0] in running:
            os.kill(children[0].pid, signal.SIGTERM)

    def _restart(
        self, attempt: int, children: list[Any], lives: dict[int, Lives], followers: Followers
    ) -> None:
        """Starts the controllers of engine nodes again that have ended, when it is time."""
        for index, its in lives.items():
            code, now_s = children[index].poll(), clock.monotonic_s()
            if code is None:
                continue
            known = lives[index] = its.ended(code, now_s) if its.due_s is None else its
            if known.due_s is None or now_s < known.due_s:
                continue
            try:
                if self.paths.all_endpoints(attempt).exists():
                    self._end_orphans(children, followers)
                    scratch.remove_folders_of_life(self.paths, attempt, index, known.life)
                    children[index] = self._start(attempt, index, known.life + 1)
                    lives[index] = known.started(known.life + 1, clock.monotonic_s())
            except (OSError, YattError):  # later again
                lives[index] = known.ended(EXIT_FAILED, now_s)

    def leave(self, attempt: int, outcome: Outcome) -> None:
        """Does nothing: no start follows automatically."""

    @property
    def _trainer_nodes(self) -> tuple[int, ...]:
        return placement_of(self.config).trainer_nodes

    def _seen(self, attempt: int, ended: dict[int, int], *, is_told: bool) -> AttemptFacts:
        """Collects the facts about the end. Exit code 75 of the leader means that it got a stop request."""
        cause = reason_of_end(self.paths.events, attempt)
        request = str(record_of_attempt(self.paths, attempt, STOP).get("reason", ""))
        if is_told:
            request = STOPPED
        elif ended[0] == EXIT_WILL_CONTINUE and all(ended[index] >= 0 for index in self._trainer_nodes):
            request = request or cause or self._last_words(attempt, 0)
        failed = next((index for index in self._trainer_nodes if ended[index] > EXIT_FINISHED), None)
        if not cause and failed is not None:
            cause = self._last_words(attempt, failed)
        return AttemptFacts(
            stop=request, ended=ended, trainer_nodes=frozenset(self._trainer_nodes), cause=cause
        )

    def _last_words(self, attempt: int, index: int) -> str:
        log = self.paths.log(attempt, f"node{index}")
        return f"see {log}, which ends:\n{log_tail(log)}"

    def _end_orphans(self, children: list[Any], followers: Followers) -> None:
        own = {each.pid for each in (*children, *followers.processes)}
        end_orphans(own, ORPHANS_S, only_marked=not self.owns_orphans)

    def _tidy(self, attempt: int, children: list[Any], lives: dict[int, Lives], followers: Followers) -> None:
        """Cleans up after killed controllers."""
        self._end_orphans(children, followers)
        launch = self.config.launch
        for index in range(launch.nodes):
            life = lives[index].life if index in lives else 1
            self.wait(partial(scratch.remove_folders_of_life, self.paths, attempt, index, life))
        scratch.remove_folders_of_the_dead(
            (Path(launch.scratch_dir), Path(launch.shm_dir))
        )  # also folders whose record is lost

    def _start(self, attempt: int, index: int, life: int = 1) -> "Any":
        argv = [
            sys.executable,
            "-P",
            "-m",
            "yatt.control",
            "--run",
            str(self.paths.root),
            "--attempt",
            str(attempt),
            "--node",
            str(index),
            "--device",
            self.device,
            "--life",
            str(life),
        ]
        log = self.paths.log(attempt, f"node{index}")
        output = self.wait(partial(open_log, log)) if life == 1 else open_log(log)
        try:
            return with_retries(
                partial(spawn_to, argv, env=self._environment(index), output=output),
                limit_s=self.config.launch.start_timeout_s if life == 1 else LATER_START_S,
            )
        finally:
            os.close(output)

    def _environment(self, index: int) -> dict[str, str]:
        """Gives each virtual node its own part of the GPUs that this process may use."""
        if self.device != "cuda":
            return dict(os.environ)
        gpus = node_gpus(self.config)
        names = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), sum(gpus))
        own = names[sum(gpus[:index]) :][: gpus[index]]
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}


def _kill(children: list[Any]) -> None:
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
