"""A whole run on this machine: attempt after attempt, each with one controller a virtual node.

The launcher does no work of the run. It claims an epoch, starts the controllers, waits, and decides by
`yatt.core.restart` whether to start again. It dies with nothing left: its children are bound to it.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from yatt import clock
from yatt.adapters.ledger import ENDED, attempts, look_whether_finished, note
from yatt.adapters.nvml import visible_devices
from yatt.adapters.orphans import adopt_orphans, end_orphans
from yatt.adapters.patience import patiently
from yatt.adapters.process import Identity, describe_exit, log_tail, open_log, spawn_to
from yatt.config.check import node_gpus
from yatt.config.schema import RunConfig
from yatt.control import scratch
from yatt.control.epochs import claim_epoch, mark_finished
from yatt.core.placement import place
from yatt.core.restart import FINAL, AttemptEnd, decide
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_WILL_CONTINUE, StoreUnreachable
from yatt.launch.committed import await_committed, committed_if_known
from yatt.launch.folder import open_attempt
from yatt.launch.folder_wait import FolderWait
from yatt.launch.follower import Follower
from yatt.obs.events import reason_of_end
from yatt.paths import RunPaths

POLL_S = 0.1
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP})
"""Signals that stop a run with its state saved. SIGHUP: the terminal was closed."""

END_TOGETHER_S = 15.0
"""After the first controller that trains has ended, the others may take so long."""

ORPHANS_S = 3.0
"""How long it may take to end what the workers of a killed controller have started."""


@dataclass(slots=True)
class Launcher:
    """One `yatt run`.

    Attributes:
        show: called often while an attempt runs, to update what a person sees.
        say: prints one line for people.
        owns_orphans: whether every orphan is of this run.
    """

    config: RunConfig
    paths: RunPaths
    device: str
    show: Callable[[], None]
    say: Callable[[str], None]
    signals: list[int] = field(default_factory=list)
    owns_orphans: bool = False

    def run(self) -> int:
        """Until finished or given up; gives the exit code."""
        self.owns_orphans = adopt_orphans()
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, self._received)
        follower = Follower(self.paths, self.say)
        if not self._folder(partial(look_whether_finished, self.paths)):
            follower.start(self.config, os.environ)
        try:
            return self._attempts(follower)
        finally:
            follower.end()

    def _received(self, number: int, _frame: object) -> None:
        """Note a signal. A second one stops the run without saving, but not SIGHUP: kernel and shell both
        send it when a terminal is closed."""
        if number != signal.SIGHUP or not self.signals:
            self.signals.append(number)

    def _attempts(self, follower: Follower) -> int:
        ends: list[AttemptEnd] = []
        is_finished, wait = partial(look_whether_finished, self.paths), self._folder
        if not wait(is_finished) and not self._has_store():
            return EXIT_WILL_CONTINUE
        while not wait(is_finished):
            epoch = wait(partial(claim_epoch, self.paths))
            about = {"wall": clock.wall_iso(), "host": os.uname().nodename, "launcher": _identity()}
            open_attempt(wait, self.paths, epoch, self.config, about)
            exit_code, reason = self._attempt(epoch, follower)
            known = ends[-1].committed if ends else 0
            committed, exit_code, reason = self._committed(known, exit_code, reason)
            ends.append(AttemptEnd(exit_code, committed))
            ended = {"exit_code": exit_code, "reason": reason, "committed": committed}
            wait(partial(note, self.paths, epoch, ENDED, ended))
            decision = decide(ends, max_without_progress=self.config.run.max_attempts_without_progress)
            if exit_code == EXIT_FINISHED:
                wait(partial(mark_finished, self.paths, epoch))
                continue
            self.say(f"attempt {epoch} ended: {reason}")
            if not decision.again:
                self.say(decision.reason) if decision.reason else None
                return decision.exit_code
            self.say(f"starting again from iteration {committed}")
        self.say(f"finished: `yatt report {self.paths.root}` shows how it went{self._model_text()}")
        return EXIT_FINISHED

    @property
    def _folder(self) -> FolderWait:
        """Steps in the run folder, which may fail for a while."""
        return FolderWait(
            root=self.paths.root, limit_s=self.config.launch.phase_timeout_s, signals=self.signals,
            ending=ENDING, say=self.say,
        )  # fmt: skip

    @property
    def _owners(self) -> tuple[int, ...]:
        return place(self.config).owners

    def _model_text(self) -> str:
        return f"; the trained model is {self.paths.model}" if self.paths.model.is_dir() else ""

    def _attempt(self, epoch: int, follower: Follower) -> tuple[int, str]:
        children = [self._start(epoch, index) for index in range(self.config.launch.nodes)]
        told = 0
        deadline_s: float | None = None
        while any(child.poll() is None for child in children):
            self.show()
            follower.check()
            if len(self.signals) > told:
                told = len(self.signals)
                os.kill(children[0].pid, signal.SIGTERM) if children[0].poll() is None else None
            if deadline_s is None and any(children[index].poll() is not None for index in self._owners):
                deadline_s = clock.monotonic_s() + END_TOGETHER_S
            if (deadline_s is not None and clock.monotonic_s() > deadline_s) or told > 1:
                self._kill(children)
            time.sleep(POLL_S)
        self.show()
        launch = self.config.launch
        own = {each.pid for each in (*children, follower.process) if each is not None}
        end_orphans(own, ORPHANS_S, only_marked=not self.owns_orphans)
        for index in range(launch.nodes):  # a controller that was killed could not
            self._folder(partial(scratch.tidy, self.paths, epoch, index))
        scratch.sweep((Path(launch.scratch_dir), Path(launch.shm_dir)))  # where the record is gone too
        codes = [children[index].returncode for index in self._owners]  # the others may be lost
        if told and EXIT_FINISHED not in codes[:1]:
            return EXIT_WILL_CONTINUE, "stopped by a signal; `yatt resume` goes on"
        return self._verdict(epoch, codes)

    def _verdict(self, epoch: int, codes: list[int]) -> tuple[int, str]:
        """The attempt's exit code is the leader's, unless an owner's controller was killed."""
        for index, code in enumerate(codes):
            if code < 0:
                return EXIT_FAILED, f"controller node{index} was {describe_exit(code)}"
        if codes[0] != EXIT_FINISHED or not any(codes):
            return codes[0], self._reason(epoch, 0)
        worst = next(index for index, code in enumerate(codes) if code)
        return EXIT_FAILED, self._reason(epoch, worst)

    def _reason(self, epoch: int, index: int) -> str:
        """The last thing the leader said why, else the end of a controller's log."""
        if reason := reason_of_end(self.paths.events, epoch):
            return reason
        log = self.paths.log(epoch, f"node{index}")
        return f"see {log}, which ends:\n{log_tail(log)}"

    def _start(self, epoch: int, index: int) -> "Any":
        argv = [
            sys.executable,
            "-P",
            "-m",
            "yatt.control",
            "--run",
            str(self.paths.root),
            "--epoch",
            str(epoch),
        ]
        argv += ["--node", str(index), "--device", self.device]
        output = self._folder(partial(open_log, self.paths.log(epoch, f"node{index}")))
        try:
            return patiently(
                partial(spawn_to, argv, env=self._environment(index), output=output),
                limit_s=self.config.launch.start_timeout_s,
            )
        finally:
            os.close(output)

    def _environment(self, index: int) -> dict[str, str]:
        """Each virtual node has a part of its own of the GPUs that this process may use."""
        if self.device != "cuda":
            return dict(os.environ)
        gpus = node_gpus(self.config)
        names = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), sum(gpus))
        own = names[sum(gpus[:index]) :][: gpus[index]]
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}

    def _kill(self, children: list[Any]) -> None:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)

    def _has_store(self) -> bool:
        """Wait until the checkpoint store answers and has what the ledger knows of; whether it does."""
        begins = not self._folder(partial(attempts, self.paths))
        try:
            found = await_committed(
                self.config, self.paths.root, is_told=lambda: bool(self.signals), say=self.say, begins=begins
            )
        except StoreUnreachable as error:
            self.say(str(error))
            return False
        return found is not None

    def _committed(self, known: int, exit_code: int, reason: str) -> tuple[int, int, str]:
        """How far the run is saved, and what the attempt's end becomes with it: before another attempt the
        store has to answer.

        Args:
            known: what an earlier attempt had committed.
        """
        if exit_code in FINAL:
            return committed_if_known(self.config, self.paths.root, otherwise=known), exit_code, reason
        try:
            found = await_committed(
                self.config, self.paths.root, is_told=lambda: bool(self.signals), say=self.say
            )
        except StoreUnreachable as error:
            return known, EXIT_WILL_CONTINUE, f"{reason}; {error}"
        if found is None:
            told = "stopped by a signal while the checkpoint store did not answer; `yatt resume` goes on"
            return known, EXIT_WILL_CONTINUE, f"{reason}; {told}"
        return found, exit_code, reason


def _identity() -> dict[str, Any]:
    """By which `yatt status` on this machine sees whether the launcher lives."""
    mine = Identity.of(os.getpid())
    return asdict(mine) if mine else {}
