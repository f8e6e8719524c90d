"""The process that srun starts on every node: checks the node and runs its controller to its end.

It opens the controller's log itself (Slurm's names for logs are wrong in steps of heterogeneous jobs),
records where it runs and how the controller ended, and forwards signals. It waits while the run folder fails.

When the launcher is killed (out of memory, or by a user), Slurm ends the whole job and sends SIGTERM to its
steps; they have KillWait seconds left. A step then claims the job's next start and requeues the job, by the
rules of the dead-man's switch (`yatt.core.attempts.deadman`).
"""

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from yatt import clock
from yatt.adapters.files.files import append_line, make_within, sealed_record, write_atomically
from yatt.adapters.files.patience import ended_by, exit_code_of, with_retries
from yatt.adapters.processes.orphans import adopt_orphans, end_orphans
from yatt.adapters.processes.process import spawn
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.run_folder.ledger import ENDED, STOP, record_of_attempt
from yatt.adapters.run_folder.staged import note_copies
from yatt.adapters.slurm.requeue import Requeue
from yatt.config.check import node_gpus, num_trainer_nodes
from yatt.config.load import load_attempt
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig, step_environment
from yatt.control.gpus.processes import scratch
from yatt.core.attempts import deadman as rules
from yatt.core.attempts.deadman import Action, Job, Observer, ObserverStage
from yatt.core.attempts.lives import Lives
from yatt.errors import (
    EXIT_FAILED,
    EXIT_USER_MISTAKE,
    EXIT_WILL_CONTINUE,
    ConfigError,
    WorkerFailed,
    YattError,
)
from yatt.launch.node.device import device_of
from yatt.launch.node.network import own_address
from yatt.launch.node.node_check import NodeCheck
from yatt.launch.node.places import NextLife, claim_life
from yatt.launch.node.staging import Staging, media_folders, sources_of
from yatt.launch.node.steps import BLIND
from yatt.launch.resolve.plan import read_job_plan
from yatt.paths import RunPaths

T = TypeVar("T")
PATIENCE_S = 600.0
"""Longest wait of one call to the run folder; equal to the launcher's wait for the plan."""

ORPHANS_S = 3.0
"""Time limit for ending the processes left by workers of a killed controller."""

HELD = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals blocked until the controller can handle them; it unblocks them once its handlers are set."""

STOP_LOOK_S = 2.0
"""Interval for checking the run folder for a stop request while models are copied."""

_WITNESSES = (0, 1)
"""Nodes whose step checks why the launcher ended; two, as out-of-memory may also kill the first one's
step."""

LIMITS = rules.Limits(silence_s=1.0)
LOOK_S, RETRY_S = 0.5, 2.0
ASK_S = 60.0
"""Upper limit for the requeue; Slurm sends SIGKILL after KillWait, by default 30 s."""


@dataclass(slots=True)
class BatchDeath:
    """The part of one step.

    Attributes:
        say: prints one line for the user.
    """

    requeue: Requeue
    say: Callable[[str], None]
    _threads: list[threading.Thread] = field(default_factory=list)
    _told_s: float = -math.inf

    def look_into(self) -> None:
        """Starts the check in a thread, once; called from the SIGTERM handler."""
        if not self._threads:
            self._threads.append(threading.Thread(target=self._run, name="batch-death", daemon=True))
            self._threads[0].start()

    def wait(self) -> None:
        """Waits for the check, if it was started."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        until_s = clock.monotonic_s() + ASK_S
        # The launcher has no heartbeat and no connection: only Slurm can answer.
        observer, action = (
            Observer(stage=ObserverStage.ASKING, counter=0, moved_s=-math.inf),
            Action.ASK_SLURM,
        )
        while action is not Action.END_SELF and clock.monotonic_s() < until_s:
            if action is Action.NOTHING:
                time.sleep(LOOK_S)
                event: rules.Event = rules.Look(clock.monotonic_s(), math.inf, 0)
            else:
                event = self._do(action, observer)
            observer, action = rules.step(observer, event, LIMITS)

    def _do(self, action: Action, observer: Observer) -> rules.Event:
        match action:
            case Action.CLAIM:
                return rules.ClaimTried(self.requeue.claim(observer.claim))
            case Action.REQUEUE:
                if rules.is_fresh(self._told_s, clock.monotonic_s(), LIMITS):
                    reply = self.requeue.succeed([], os.environ)
                    done = f"job {reply.out} continues the run" if reply.out else "requeued"
                    self.say(f"the launcher was killed: {done if reply.code == 0 else reply.says}")
                    time.sleep(0 if reply.code == 0 else RETRY_S)
                return rules.RequeueReturned()
            case _:
                state = self.requeue.state()
                self._told_s = clock.monotonic_s()
                return rules.SlurmSaid(Job.OVER if state is Job.SAME else state)


def main() -> int:
    """Runs one controller; returns its exit code."""
    try:
        return _run()
    except (YattError, OSError) as error:
        return ended_by(error, "yatt")


def _run() -> int:
    parser = argparse.ArgumentParser(prog="yatt.launch.node.step")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--indexes", required=True, help="the run's node index of each task of this step")
    parser.add_argument("--absent", default="")
    parser.add_argument("--life", type=int, default=1, help="number of the controller's first process here")
    parser.add_argument("--guest", action="store_true", help="this is a node of another job, which joins")
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # until the controller runs
    paths = RunPaths(arguments.run)
    node = int(arguments.indexes.split(",")[int(os.environ["SLURM_PROCID"])])
    answer_stack_requests(paths.root, f"step{node}", arguments.attempt)
    if not _waited_for(paths.config.exists):
        name = os.environ.get("SLURMD_NODENAME", f"node{node}")
        sys.stderr.write(f"yatt: {name} {BLIND} {paths.root}; use a folder that all nodes share.\n")
        return EXIT_USER_MISTAKE
    step = _Step(
        paths, arguments.attempt, node, arguments.absent, life=arguments.life, is_guest=arguments.guest
    )
    return step.run()


@dataclass(slots=True)
class _Ending:
    """What tells a step to end: signals, which it passes on to its controller, and the run's stop request."""

    paths: RunPaths
    attempt: int
    is_guest: bool
    controller: "subprocess.Popen[bytes] | None" = None
    death: BatchDeath | None = None
    is_told: bool = False
    is_stopped: bool = False
    looked_s: float = 0.0

    def received(self, number: int, _frame: object) -> None:
        """Handles a signal."""
        self.is_told = True
        if self.controller is not None:
            self.controller.send_signal(signal.SIGUSR1 if self.is_guest else number)
        if number == signal.SIGTERM and self.death is not None:
            self.death.look_into()

    def began(self, controller: "subprocess.Popen[bytes]") -> None:
        """Passes signals on to this controller from now on, also one that came while it was being started."""
        self.controller = controller
        if self.is_told:
            controller.send_signal(signal.SIGUSR1 if self.is_guest else signal.SIGTERM)

    def is_near(self) -> bool:
        """Whether a signal (received or blocked) or a stop request in the run folder ends this step."""
        if self.is_told or signal.sigpending() & {*HELD}:
            return True
        if clock.monotonic_s() - self.looked_s > STOP_LOOK_S:
            self.looked_s = clock.monotonic_s()
            with contextlib.suppress(OSError):
                self.is_stopped = bool(record_of_attempt(self.paths, self.attempt, STOP))
        return self.is_stopped


@dataclass(slots=True)
class _Step:
    """The part of one node in an attempt."""

    paths: RunPaths
    attempt: int
    node: int
    absent: str
    life: int = 1
    is_guest: bool = False
    is_engine_node: bool = False
    staging: Staging | None = None
    ending: _Ending = field(init=False)

    def __post_init__(self) -> None:
        self.ending = _Ending(self.paths, self.attempt, self.is_guest)

    def run(self) -> int:
        """Checks the node, then runs its controller to its end; returns the exit code."""
        log = self.paths.log(self.attempt, f"node{self.node}")
        try:
            site = _waited_for(partial(read_job_plan, self.paths)).site
            environment = step_environment(site, {**_names_of(site), **os.environ})
            if self.node in _WITNESSES and not self.is_guest:
                self.ending.death = _batch_death(self.paths, self.attempt, site, log)
            signal.signal(signal.SIGTERM, self.ending.received)
            config = _waited_for(partial(load_attempt, self.paths, self.attempt))
            self.is_engine_node = self.node >= num_trainer_nodes(config)
            check = self._check(config, site, environment)
            unfit = check.run() if site.node_check.enabled else None
            if unfit is not None:
                return self._refused(log, unfit.why, unfit.exit_code, {"unfit": unfit.why})
            device = device_of(check.device)
            argv = self._controller(site, device)
            self.staging = Staging(site.stage, environment, partial(_say_in, log), self.ending.is_near)
            if self.staging.is_wanted:
                self._note({"device": device})  # the node passed the check; report that before the copying
                argv[0] = self._stage(
                    self.staging, sources_of(config, site.stage, self.node), media_folders(config, site.stage)
                )
        except (ConfigError, WorkerFailed) as error:
            return self._refused(log, str(error), exit_code_of(error), {})
        except OSError as error:  # no route to the first node
            return self._refused(log, str(error), EXIT_FAILED, {})
        if not self.ending.is_told:
            return self._run_to_its_end(argv, environment, log)
        self._note({"ended": EXIT_WILL_CONTINUE})
        self._close()
        return EXIT_WILL_CONTINUE

    def _check(self, config: RunConfig, site: SiteConfig, env: dict[str, str]) -> NodeCheck:
        launch = config.launch
        folders = (Path(launch.scratch_dir), Path(launch.shm_dir))
        return NodeCheck(site, folders, launch.device, node_gpus(config)[self.node], env)

    def _refused(self, log: Path, why: str, code: int, more: dict[str, str]) -> int:
        """Starts no controller, and records the reason."""
        _waited_for(partial(make_within, self.paths.root, log.parent))
        _waited_for(partial(append_line, log, f"node{self.node}: {why}"))
        self._note({**more, "ended": code})
        return code

    def _controller(self, site: SiteConfig, device: str) -> list[str]:
        argv = [sys.executable, "-P", "-m", "yatt.control", "--run", str(self.paths.root)]
        argv += ["--attempt", str(self.attempt), "--node", str(self.node), "--device", device]
        argv += ["--host", own_address(site, os.environ)]
        argv += [] if self.is_guest else ["--slurm", site.requeue]  # a guest starts no job of the run anew
        return [*argv, *(("--absent", self.absent) if self.absent else ())]

    def _run_to_its_end(self, argv: list[str], environment: dict[str, str], log: Path) -> int:
        """Runs the controller; on an engine node, starts it again if it ends before the attempt does."""
        owns_orphans = adopt_orphans()
        about = {"device": argv[argv.index("--device") + 1]}
        lives = Lives(life=self.life, began_s=clock.monotonic_s())
        next_life = NextLife(self.paths, self.attempt, self.node, lambda: self.ending.is_told)
        while True:
            signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # until the controller handles them
            life = [*argv, "--life", str(lives.life)]
            controller = _waited_for(partial(spawn, life, env=environment, log=log))
            self.ending.began(controller)
            for number in HELD:
                signal.signal(number, self.ending.received)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
            self._note({"pid": controller.pid, "life": lives.life, **about})
            code = controller.wait()
            end_orphans((), ORPHANS_S, only_marked=not owns_orphans)  # a killed controller could not do it
            _waited_for(
                partial(scratch.remove_folders_of_life, self.paths, self.attempt, self.node, lives.life)
            )
            lives = lives.ended(code, clock.monotonic_s())
            if self.is_engine_node and lives.due_s is not None:  # else the launcher takes the node for dead
                self._note({"pid": controller.pid, "life": lives.life + 1, **about})
            if not self.is_engine_node or not next_life.wait(lives.life, lives.due_s):
                break
            claimed = _waited_for(partial(claim_life, self.paths, self.attempt, self.node, lives.life + 1))
            lives = lives.started(claimed, clock.monotonic_s())
        self._note({"pid": controller.pid, **about, "ended": code})
        self._close()
        return code if code >= 0 else 128 - code

    def _stage(self, staging: Staging, sources: tuple[str, ...], media: tuple[str, ...] = ()) -> str:
        """Copies the sources and the environment to this node's disk, except after a failed attempt, because
        the disk may have caused the failure; returns the Python interpreter for the controller."""
        if (
            _waited_for(partial(record_of_attempt, self.paths, self.attempt - 1, ENDED)).get("exit_code")
            == EXIT_FAILED
        ):
            staging.say("the previous attempt failed: this attempt reads nothing from stage.folder")
            return sys.executable
        if (copies := staging.run(sources, media)) or self.is_guest:  # instead of those of the node before
            try:
                _waited_for(partial(note_copies, self.paths, self.attempt, self.node, copies))
            except (YattError, OSError) as error:
                staging.say(f"the copies are not used, because they cannot be recorded: {error}")
        return staging.local_python()  # after the models: one that is not unpacked in time begins anew

    def _close(self) -> None:
        if self.staging is not None:
            self.staging.close()
        if self.ending.death is not None:
            self.ending.death.wait()

    def _note(self, content: dict[str, Any]) -> None:
        """Writes this node's record. If that fails, the controller goes on: the launcher sees its end by
        srun. A guest is not the run's launcher's, and writes none."""
        if self.is_guest:
            return
        path = self.paths.controller_record(self.attempt, self.node)
        where = {"slurm_node": os.environ.get("SLURMD_NODENAME", ""), "host": socket.gethostname()}

        def write() -> None:
            make_within(self.paths.root, path.parent)
            write_atomically(path, sealed_record({**where, **content}, self.attempt))

        try:
            _waited_for(write)
        except (YattError, OSError) as error:
            sys.stderr.write(f"yatt: node{self.node}: {path} is not written: {error}\n")


def _names_of(site: SiteConfig) -> dict[str, str]:
    named = {"GLOO_SOCKET_IFNAME": site.interface, "NCCL_SOCKET_IFNAME": site.interface}
    return named if site.interface else {}


def _batch_death(paths: RunPaths, attempt: int, site: SiteConfig, log: Path) -> BatchDeath | None:
    requeue = Requeue.of_this_start(paths, attempt, site.requeue)

    return BatchDeath(requeue, partial(_say_in, log)) if requeue.can_ask() else None


def _say_in(log: Path, text: str) -> None:
    """Appends one line to the controller's log, because srun may have been killed as well."""
    with contextlib.suppress(OSError):
        append_line(log, f"{clock.wall_iso()} yatt: {text}")


def _waited_for(work: Callable[[], T]) -> T:
    return with_retries(work, limit_s=PATIENCE_S)


if __name__ == "__main__":
    sys.exit(main())
