"""`yatt join`: submits a job whose nodes take the places of engine nodes that a run has lost."""

import sys
from collections.abc import Sequence
from pathlib import Path

from yatt.adapters.run_folder.ledger import STARTED, newest_attempt, record_of_attempt, run_is_finished
from yatt.config.check import num_trainer_nodes
from yatt.config.site import with_settings
from yatt.errors import EXIT_FINISHED, ConfigError
from yatt.launch.attempt.jobcall import join_job
from yatt.launch.attempt.join import IDLE_S, guests_part
from yatt.launch.commands.executor import HetJob
from yatt.launch.commands.submit import executor_for, submitting_outside_jobs
from yatt.launch.folder.folder import open_existing
from yatt.launch.resolve.plan import read_job_plan
from yatt.paths import RunPaths


def submit_join(folder: Path, settings: Sequence[str], nodes: int, *, dry_run: bool) -> int:
    """Submits a joining job of the run in `folder`.

    Args:
        settings: changes of the site's settings, `key=value`, for what sbatch is asked; the job's steps use
            the site of the run's last submission.
        nodes: how many places the job can take at once.

    Raises:
        ConfigError: the run is finished, has no job or no engine nodes, or sbatch refused the job.
        DeadlineExceeded: see `HetExecutor`.
    """
    paths, config = open_existing(folder)
    if run_is_finished(paths):
        raise ConfigError(f"{paths.root} is finished: there is nothing to join.")
    plan = read_job_plan(paths)
    site = with_settings(plan.site, list(settings))
    config = plan.attempt_config(config)
    part = guests_part(config, plan, nodes)
    most = config.launch.nodes - num_trainer_nodes(config)
    if not 1 <= nodes <= most:
        raise ConfigError(f"--nodes {nodes}: write 1 to {most}; the run has {most} engine nodes.")
    if not _has_lost_place(paths, range(num_trainer_nodes(config), config.launch.nodes)):
        sys.stderr.write(
            f"yatt: note: {paths.root} has lost no engine node now: the job's nodes idle until it does, at "
            f"most {IDLE_S / 60:g} minutes.\n"
        )
    names = {"job_name": f"yatt-join-{paths.root.name}", "comment": f"joins {paths.root}"}
    executor = executor_for(paths, site, "join", [part], requeue=False, **names)
    if dry_run:
        sys.stdout.write(executor.text().rstrip() + "\n")
        return EXIT_FINISHED
    with submitting_outside_jobs():
        job: HetJob = executor.submit(join_job, str(paths.root))
    sys.stdout.write(
        f"submitted job {job.job_id}: {nodes} node(s) that take the places of engine nodes that "
        f"{paths.root} has lost. It ends with the run; `scancel {job.job_id}` ends it before.\n"
    )
    return EXIT_FINISHED


def _has_lost_place(paths: RunPaths, engine_nodes: range) -> bool:
    """Whether a node of the newest attempt is absent, or was declared lost."""
    attempt = newest_attempt(paths)
    absent = record_of_attempt(paths, attempt, STARTED).get("absent", []) if attempt else []
    return bool(absent) or any(paths.lost(attempt, node).exists() for node in engine_nodes)
