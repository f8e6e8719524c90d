"""One start of a Slurm job: runs in the batch script, starts a controller on every node, handles its end.

python -m yatt.launch.attempt.job RUN        in your own sbatch script; `yatt submit` calls `run_start` with
submitit
"""

import contextlib
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from yatt import clock
from yatt.adapters.files.files import share_with
from yatt.adapters.files.patience import ended_by
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.run_folder.ledger import look_whether_finished
from yatt.adapters.run_folder.run_config import check_unedited, load_run
from yatt.adapters.slurm.job_note import note_job, noted_job
from yatt.adapters.slurm.slurm import Slurm
from yatt.errors import EXIT_FINISHED, EXIT_USER_MISTAKE, ConfigError, YattError
from yatt.launch.attempt.attempts import Attempts
from yatt.launch.attempt.on_slurm import SlurmBackend
from yatt.launch.folder.folder_wait import FolderWait
from yatt.launch.node.allocation import allocation_of
from yatt.launch.resolve.plan import components_of, read_job_plan
from yatt.paths import RunPaths

PLAN_S = 600.0
"""Longest wait for the run folder before the config is read; then `launch.phase_timeout_s` applies."""


def run_start(paths: RunPaths) -> int:
    """Runs this start of the job to its end; returns the exit code.

    Raises:
        ConfigError: this is not a job, it lacks nodes, or the folder is not a run folder.
        YattError: see `Attempts.run`.
    """
    answer_stack_requests(paths.root, "launcher")
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda received, _frame: signals.append(received))
    signal.signal(signal.SIGCONT, signal.SIG_IGN)
    wait = FolderWait(
        root=paths.root, limit_s=PLAN_S, signals=signals, ending=frozenset({signal.SIGTERM}), say=say_in_log
    )
    if wait(partial(look_whether_finished, paths)):
        say_in_log(f"{paths.root} is finished: nothing to do")
        return EXIT_FINISHED
    plan = wait(partial(read_job_plan, paths))
    try:
        wait(partial(check_unedited, paths))
    except ConfigError as error:  # an edit has no effect, so the run continues
        say_in_log(str(error))
    config = plan.attempt_config(wait(partial(load_run, paths)))
    share_with(config.run.share)
    allocation = allocation_of(os.environ, components_of(config, plan.site, plan.layout))
    wait = replace(wait, limit_s=config.launch.phase_timeout_s)
    with contextlib.suppress(OSError):  # for users, and for the next `yatt submit`
        _register(paths, allocation.job_id)
    backend = SlurmBackend(config, paths, plan, allocation, signals, say_in_log)
    return Attempts(config, paths, backend, wait, say_in_log).run(os.environ)


def _register(paths: RunPaths, job_id: str) -> None:
    """Records a job that was submitted without `yatt submit` as the run's job."""
    noted = noted_job(paths)
    if noted is None or noted.job != job_id or not noted.command:
        note_job(paths, job_id, Slurm().show_job(job_id))


def say_in_log(text: str) -> None:
    """Prints one line to the job's log."""
    sys.stdout.write(f"{clock.wall_iso()} yatt: {text}\n")
    sys.stdout.flush()


def main() -> int:
    """Entry point of sbatch scripts."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m yatt.launch.attempt.job RUN\n")
        return EXIT_USER_MISTAKE
    try:
        return run_start(RunPaths(Path(sys.argv[1]).absolute()))
    except (YattError, OSError) as error:
        return ended_by(error, "yatt")


if __name__ == "__main__":
    sys.exit(main())
