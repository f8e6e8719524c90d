"""`yatt cancel`: stops a run through its folder, or its job through Slurm, from any login node."""

import sys
import time

from yatt import clock
from yatt.adapters.run_folder.ledger import (
    ENDED,
    STARTED,
    STOP,
    newest_attempt,
    record_of_attempt,
    run_is_finished,
    write_record,
)
from yatt.adapters.slurm.slurm import PERSON_S, Slurm
from yatt.core.attempts.outcome import CANCEL
from yatt.errors import EXIT_FINISHED, ConfigError, DeadlineExceeded
from yatt.launch.folder.jobs import JobView, is_cut_off, job_view
from yatt.paths import RunPaths

POLL_S, LOOK_S = 0.5, 5.0
MOST_SILENT = 3
"""Questions without an answer after which the end of a job is not waited for."""

CANCEL_LIMIT_S, OVER_LIMIT_S = 600.0, 60.0


def cancel_run(paths: RunPaths, slurm: Slurm, *, now: bool) -> str:
    """Ends a run, after a checkpoint or at once; returns a message that says what was done.

    Raises:
        ConfigError: the run has no process and no job.
        DeadlineExceeded: it did not end in time.
    """
    view, attempt = job_view(paths, slurm.within(PERSON_S)), newest_attempt(paths)
    is_running = bool(record_of_attempt(paths, attempt, STARTED)) and not record_of_attempt(
        paths, attempt, ENDED
    )
    is_running = is_running and not is_cut_off(paths, attempt)
    if view.state == "UNKNOWN" and is_running and not now:
        return _stop(paths, attempt, slurm)  # through the run folder: Slurm is not needed for it
    if view.state == "UNKNOWN":
        sys.stdout.write("Slurm does not answer; asking once more\n")
        sys.stdout.flush()
        view = job_view(paths, slurm)
    _check_can_cancel(paths, view)
    if view.job_id and (now or view.state != "RUNNING" or not is_running):
        reply = slurm.call("scancel", view.job_id)
        if reply.code != 0:
            raise DeadlineExceeded(f"scancel {view.job_id}: {reply.says}")
        _wait_until_over(paths, slurm)
        return f"job {view.job_id} cancelled; `yatt resume` resumes from the newest checkpoint"
    if not is_running:
        raise ConfigError(f"{paths.root} is not running: there is nothing to cancel.")
    return _stop(paths, attempt, slurm)


def _check_can_cancel(paths: RunPaths, view: JobView) -> None:
    if run_is_finished(paths) and not view.is_alive:
        raise ConfigError(f"{paths.root} is finished: there is nothing to cancel.")
    if view.state == "UNKNOWN":
        raise DeadlineExceeded(f"Slurm does not answer, so job {view.job_id} cannot be cancelled; try again.")
    if view.job_id and not view.is_alive:
        raise ConfigError(f"job {view.job_id} is over ({view.state}): there is nothing to cancel.")


def _stop(paths: RunPaths, attempt: int, slurm: Slurm) -> str:
    """Requests a stop through the run folder, and waits until the attempt has ended."""
    write_record(paths, attempt, STOP, {"reason": CANCEL})
    sys.stdout.write(f"attempt {attempt} saves and stops; waiting for it (Ctrl-C ends only the waiting)\n")
    sys.stdout.flush()
    until_s = clock.monotonic_s() + CANCEL_LIMIT_S
    looked_s = clock.monotonic_s()
    while not record_of_attempt(paths, attempt, ENDED):
        if clock.monotonic_s() > until_s:
            raise DeadlineExceeded(
                f"attempt {attempt} did not end in {CANCEL_LIMIT_S:g} s; `yatt cancel --now` ends it at once"
            )
        if clock.monotonic_s() > looked_s + LOOK_S:
            looked_s = clock.monotonic_s()
            _check_is_there(paths, attempt, slurm)
        time.sleep(POLL_S)
    _wait_until_over(paths, slurm)
    ended = record_of_attempt(paths, attempt, ENDED)
    if ended.get("exit_code") == EXIT_FINISHED:
        return "the run finished before it could be stopped"
    return f"stopped after iteration {ended.get('committed')}, which is saved; `yatt resume` resumes"


def _wait_until_over(paths: RunPaths, slurm: Slurm) -> None:
    """Waits until the job is gone, so that the next command does not find it; Slurm needs its KillWait."""
    until_s = clock.monotonic_s() + OVER_LIMIT_S
    num_silent = 0
    while clock.monotonic_s() < until_s and num_silent < MOST_SILENT:
        view = job_view(paths, slurm.within(PERSON_S))
        num_silent += view.state == "UNKNOWN"
        if not view.job_id or (not view.is_alive and view.state != "UNKNOWN"):
            return
        time.sleep(POLL_S)


def _check_is_there(paths: RunPaths, attempt: int, slurm: Slurm) -> None:
    view = job_view(paths, slurm)
    if is_cut_off(paths, attempt):
        over = "its process is gone"
    elif view.job_id and not view.is_alive and view.state != "UNKNOWN":
        over = f"job {view.job_id} is {view.state}"
    elif view.state == "PENDING":
        raise DeadlineExceeded(
            f"job {view.job_id} was queued again, and attempt {attempt} is over; type `yatt cancel` once more"
        )
    else:
        return
    raise DeadlineExceeded(
        f"{over} and attempt {attempt} did not save; `yatt resume` resumes from the newest checkpoint"
    )
