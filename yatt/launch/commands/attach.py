"""`yatt attach RUN [NODE]`: opens a shell, or runs a command, on a node of the run, inside its job."""

import os
import sys

from yatt.adapters.files.files import read_or_none, unsealed_any
from yatt.adapters.run_folder.ledger import newest_attempt
from yatt.adapters.slurm.job_note import noted_job
from yatt.adapters.slurm.slurm import Slurm, environment_outside_jobs
from yatt.config.check import num_trainer_nodes
from yatt.config.load import load_attempt
from yatt.errors import ConfigError, DeadlineExceeded
from yatt.launch.folder.jobs import job_view
from yatt.launch.resolve.plan import read_job_plan
from yatt.paths import RunPaths


def attach_to_job(paths: RunPaths, node: int, command: list[str]) -> int:
    """Replaces this process by srun inside the run's job; does not return.

    Args:
        node: index of the node in the run; 0 is the leader's.
        command: empty for the user's shell.

    Raises:
        ConfigError: the run has no running Slurm job, or no such node.
        DeadlineExceeded: Slurm does not answer.
    """
    job, noted = job_view(paths, Slurm()), noted_job(paths)
    if job.state == "UNKNOWN":
        raise DeadlineExceeded("Slurm does not answer; try again.")
    if noted is None or job.state != "RUNNING":
        raise ConfigError(f"{paths.root} has no running job; see `yatt status {paths.root}`.")
    argv = srun_into(paths, job.job_id, node, is_a_tty=sys.stdin.isatty() and not command)
    shell = os.environ.get("SHELL", "/bin/bash")
    os.execvpe("srun", [*argv, *(command or [shell, "-l"])], environment_outside_jobs(os.environ))


def srun_into(paths: RunPaths, job_id: str, node: int, *, is_a_tty: bool) -> list[str]:
    """Returns the srun command of a step that shares the job's resources on that node (--overlap).

    Raises:
        ConfigError: the newest attempt has no such node.
    """
    attempt = newest_attempt(paths)
    entry = unsealed_any(read_or_none(paths.controller_record(attempt, node))) or {}
    if not (name := entry.get("slurm_node")):
        raise ConfigError(
            f"node {node} has no controller in attempt {attempt}; see `yatt status {paths.root}`."
        )
    plan = read_job_plan(paths)
    group = _group(paths, node) if plan.layout == "het" else None
    return [
        "srun",
        f"--jobid={job_id}",
        *([] if group is None else [f"--het-group={group}"]),
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={name}",
        "--export=ALL",
        "--mpi=none",
        *(["--pty"] if is_a_tty else []),
    ]


def _group(paths: RunPaths, node: int) -> int:
    return int(node >= num_trainer_nodes(load_attempt(paths, newest_attempt(paths))))
