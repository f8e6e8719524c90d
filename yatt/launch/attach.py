"""`yatt attach RUN [NODE]`: a shell, or a command, beside the workers of one of the run's nodes."""

import os
import sys

from yatt.adapters.files import read_or_none, unsealed_any
from yatt.adapters.job_note import noted_job
from yatt.adapters.ledger import newest_attempt
from yatt.adapters.slurm import Slurm, outside_of_jobs
from yatt.config.check import num_trainer_nodes
from yatt.config.load import load_attempt
from yatt.errors import ConfigError, DeadlineExceeded
from yatt.launch.jobs import job_view
from yatt.launch.plan import read_plan
from yatt.paths import RunPaths


def attach(paths: RunPaths, node: int, command: list[str]) -> int:
    """Become srun, inside the run's job; does not return.

    Args:
        node: of the run, 0 is the leader's.
        command: empty for a shell of the user's.

    Raises:
        ConfigError: the run does not run on Slurm now, or has no such node.
        DeadlineExceeded: Slurm does not answer.
    """
    job, noted = job_view(paths, Slurm()), noted_job(paths)
    if job.state == "UNKNOWN":
        raise DeadlineExceeded("Slurm does not answer; try again.")
    if noted is None or job.state != "RUNNING":
        raise ConfigError(f"no job of {paths.root} runs now: `yatt status {paths.root}`.")
    argv = _srun(paths, job.job_id, node, is_a_tty=sys.stdin.isatty() and not command)
    shell = os.environ.get("SHELL", "/bin/bash")
    os.execvpe("srun", [*argv, *(command or [shell, "-l"])], outside_of_jobs(os.environ))


def _srun(paths: RunPaths, job_id: str, node: int, *, is_a_tty: bool) -> list[str]:
    """A step that shares what the job has on that node, and takes nothing from it."""
    attempt = newest_attempt(paths)
    entry = unsealed_any(read_or_none(paths.controller_record(attempt, node))) or {}
    if not (name := entry.get("slurm_node")):
        raise ConfigError(f"node {node} has no controller in attempt {attempt}: `yatt status {paths.root}`.")
    plan = read_plan(paths)
    group = _group(paths, node) if plan.layout == "het" else None
    return [
        "srun", f"--jobid={job_id}", *([] if group is None else [f"--het-group={group}"]), "--overlap",
        "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--export=ALL", "--mpi=none",
        *(["--pty"] if is_a_tty else []),
    ]  # fmt: skip


def _group(paths: RunPaths, node: int) -> int:
    return int(node >= num_trainer_nodes(load_attempt(paths, newest_attempt(paths))))
