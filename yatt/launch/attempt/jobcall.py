"""The functions that submitit calls in a batch script: they run the job's launcher."""

import sys
from pathlib import Path

from submitit import JobEnvironment
from submitit.core.utils import cloudpickle_dump, temporary_save_path

from yatt.errors import EXIT_FINISHED, EXIT_WILL_CONTINUE, YattError
from yatt.launch.attempt.job import run_start
from yatt.launch.attempt.join import run_join
from yatt.paths import RunPaths


def join_job(root: str) -> str:
    """Runs a joining job; `job.result()` returns the run folder."""
    try:
        run_join(RunPaths(Path(root)))
    except YattError as error:
        sys.stderr.write(f"yatt: {error}\n")
        sys.exit(error.exit_code)
    return root


def run_job(root: str) -> str:
    """Runs one start of the job; `job.result()` returns the run folder once the run is finished.

    A start that fails stores the reason as submitit's error and ends with its own exit code. A start that
    will be continued stores nothing: the next start writes the result.
    """
    files = JobEnvironment().paths
    files.result_pickle.unlink(missing_ok=True)  # the file of an earlier start would report the job as over
    try:
        code = run_start(RunPaths(Path(root)))
        reason = f"the run in {root} ended with exit code {code}; see its log"
    except YattError as error:
        sys.stderr.write(f"yatt: {error}\n")
        code, reason = error.exit_code, str(error)
    if code == EXIT_FINISHED:
        return root
    if code != EXIT_WILL_CONTINUE:
        with temporary_save_path(files.result_pickle) as path:
            cloudpickle_dump(("error", reason), path)
    sys.exit(code)
