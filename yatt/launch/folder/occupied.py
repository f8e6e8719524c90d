"""Refuses to start a run that is already active; with --take-over, lets the active start save and stop."""

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from yatt import clock
from yatt.adapters.files.files import read_or_none, unsealed_any
from yatt.adapters.processes.process import Identity
from yatt.adapters.run_folder.ledger import ENDED, STARTED, newest_attempt, record_of_attempt, run_is_finished
from yatt.adapters.slurm.slurm import Slurm
from yatt.core.attempts.occupancy import Life, Signs, life_of
from yatt.errors import AlreadyGoing, ConfigError, DeadlineExceeded
from yatt.launch.folder.cancel import cancel_run
from yatt.launch.folder.jobs import job_view
from yatt.paths import RunPaths

HEARTBEAT_WATCH_S = 10.0
"""A leader's heartbeat increases every 3 s; if it does not change for this long, the leader is gone."""

TAKE_OVER_S = 900.0
AFTER_S = 30.0
"""Longest wait for a launcher to exit after it has recorded its end."""

POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Occupant:
    """The active start of a run: its newest attempt, and a text that says where it runs (empty if none is
    active)."""

    attempt: int
    where: str = ""


def make_way(paths: RunPaths, *, take_over: bool, slurm: Slurm | None = None) -> None:
    """Makes sure that the run is not active, before it is started.

    Args:
        take_over: let an active start save and stop, as `yatt cancel` does, instead of refusing.

    Raises:
        ConfigError: the run is active, and `take_over` is False.
        DeadlineExceeded: the active start did not stop in time.
    """
    if not any(each.exists() for each in (paths.claims, paths.job, paths.plan)):
        return  # never started, and never submitted
    slurm = slurm or Slurm()
    found = find_occupant(paths, slurm)
    if not found.where:
        return
    if not take_over:
        how = "." if paths.evaluation.exists() else ", or add --take-over: the run then saves and stops."
        raise AlreadyGoing(
            f"{found.where} already; see `yatt status {paths.root}`. Nothing was started. Stop it with "
            f"`yatt cancel {paths.root}`{how}"
        )
    sys.stdout.write(f"{found.where}: taking over\n")
    _wait_for_end(paths, slurm, found)


def _wait_for_end(paths: RunPaths, slurm: Slurm, found: Occupant) -> None:
    until_s = clock.monotonic_s() + TAKE_OVER_S
    while found.where:
        if clock.monotonic_s() > until_s:
            raise DeadlineExceeded(
                f"{found.where} and did not stop in {TAKE_OVER_S:g} s; nothing was started. See "
                f"`yatt status {paths.root}`; `yatt cancel --now {paths.root}` ends a job without saving."
            )
        try:
            sys.stdout.write(cancel_run(paths, slurm, now=False) + "\n")
        except (ConfigError, DeadlineExceeded):  # it ended, crashed, or is between two attempts
            time.sleep(POLL_S)
        _wait_for_launcher(paths, newest_attempt(paths))
        found = find_occupant(paths, slurm)


def _wait_for_launcher(paths: RunPaths, attempt: int) -> None:
    until_s = clock.monotonic_s() + AFTER_S
    while (
        record_of_attempt(paths, attempt, ENDED)
        and _launcher(paths, attempt)[1]
        and clock.monotonic_s() < until_s
    ):
        time.sleep(POLL_S)


def find_occupant(paths: RunPaths, slurm: Slurm) -> Occupant:
    """Finds the active start of the run; watches the heartbeat for a while if nothing else tells."""
    attempt = newest_attempt(paths)
    started = record_of_attempt(paths, attempt, STARTED)
    job = job_view(paths, slurm)
    is_here, lives = _launcher(paths, attempt)
    job_lives = None if job.state in ("", "UNKNOWN") else job.is_alive
    signs = Signs(
        is_finished=run_is_finished(paths),
        is_started=bool(started),
        is_ended=bool(record_of_attempt(paths, attempt, ENDED)),
        launcher_is_here=is_here,
        launcher_lives=lives,
        job_lives=job_lives,
        is_of_job=bool(job.job_id) and started.get("job") == job.job_id,
    )
    going_on = f"attempt {attempt} of this run is active"
    match life_of(signs):
        case Life.OVER:
            return Occupant(attempt)
        case Life.ALIVE if job_lives:
            return Occupant(attempt, f"job {job.job_id} of this run is {job.state}")
        case Life.ALIVE:
            return Occupant(attempt, f"{going_on} in process {started['launcher']['pid']} of this machine")
    where = f"{going_on}, on {started.get('host', 'another machine')}"
    return Occupant(attempt, where if _heartbeat_moves(paths, attempt) else "")


def _launcher(paths: RunPaths, attempt: int) -> tuple[bool, bool]:
    """Returns whether the attempt's launcher is on this machine, and whether it runs."""
    noted: dict[str, Any] = record_of_attempt(paths, attempt, STARTED).get("launcher", {})
    if not noted:
        return False, False
    who = Identity(**noted)
    is_over_here = who.pid == os.getpid() and bool(
        record_of_attempt(paths, attempt, ENDED)
    )  # an earlier `yatt.run`
    return who.is_of_here(), who.is_of_here() and not who.is_gone() and not is_over_here


def _heartbeat_moves(paths: RunPaths, attempt: int) -> bool:
    def seen() -> tuple[Any, ...]:
        heartbeat = unsealed_any(read_or_none(paths.heartbeat(attempt))) or {}
        return heartbeat.get("counter"), newest_attempt(paths)

    first, until_s = seen(), clock.monotonic_s() + HEARTBEAT_WATCH_S
    sys.stdout.write(
        f"attempt {attempt} was started on another machine; checking whether it is still running\n"
    )
    sys.stdout.flush()
    while clock.monotonic_s() < until_s:
        if record_of_attempt(paths, attempt, ENDED):
            return False
        if seen() != first:
            return True
        time.sleep(POLL_S)
    return False
