"""What submitit calls in the batch script: the job's launcher, with its exit code."""

import sys
from pathlib import Path

from submitit import JobEnvironment
from submitit.core.utils import cloudpickle_dump, temporary_save_path

from yatt.errors import EXIT_FINISHED, EXIT_WILL_CONTINUE, YattError
from yatt.launch.job import run_start
from yatt.paths import RunPaths


def run_job(root: str) -> str:
    """Run one start of the job; `job.result()` gives the run folder once the run is finished.

    A start that fails leaves the reason as submitit's error, and its own exit code as the job's. One that
    will be continued leaves nothing: the result is the next start's.
    """
    files = JobEnvironment().paths
    files.result_pickle.unlink(missing_ok=True)  # a former start's would make people think the job is over
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
