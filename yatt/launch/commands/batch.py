"""What a batch script of `yatt submit` or `yatt join` runs: submitit's process, and in it the launcher.

python -m yatt.launch.commands.batch run|join RUN

submitit gives a job its work in a file with the job's id, which the submitter names after sbatch has
answered. A job whose submitter got no answer, or was killed, or that another job submitted as its successor,
writes that file itself: it is the same for every job of a run.
"""

import os
import sys
from pathlib import Path

from submitit import JobEnvironment
from submitit.core.utils import DelayedSubmission

from yatt.launch.attempt.jobcall import join_job, run_job
from yatt.paths import RunPaths

WORKS = {"run": run_job, "join": join_job}
MOST_TIMEOUTS = 10**6
"""submitit's own restarts are not used."""


def work_of(name: str, root: Path) -> DelayedSubmission:
    """Returns submitit's record of the work of a job.

    Args:
        name: a key of `WORKS`.
        root: absolute path of the run folder.
    """
    work = DelayedSubmission(WORKS[name], str(root))
    work.set_timeout(1, MOST_TIMEOUTS)
    return work


def main() -> None:
    """Entry point of the batch script."""
    # Here, because it imports numpy, and `yatt submit` imports this module.
    from submitit.core.submission import process_job

    name, root = sys.argv[1], Path(sys.argv[2])
    folder = RunPaths(root).submitit
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    if not (file := JobEnvironment().paths.submitted_pickle).exists():
        new = file.with_name(f".{file.name}.{os.getpid()}")  # a start that was killed here left another
        work_of(name, root).dump(new)
        new.replace(file)
    process_job(folder)


if __name__ == "__main__":
    main()
