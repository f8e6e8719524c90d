"""The Python equivalent of `yatt submit`, for users of submitit.

    import yatt
    job = yatt.submit("run.yaml", "site.yaml", "optimizer.lr=1.0e-6", time_limit_min=30, reservation="course")
    print(job.job_id, job.state)
    folder = job.result()

The last line waits until the run is finished, through all of its starts.
"""

import os
from dataclasses import fields
from pathlib import Path

import yaml

from yatt.config.load import load_command
from yatt.config.site import SiteConfig, load_site, with_settings
from yatt.errors import ConfigError
from yatt.launch.completed import completed
from yatt.launch.executor import HetJob
from yatt.launch.submit import submit_job, with_store

Value = str | int | float | bool


def submit(
    config: str | os.PathLike[str], site: str | os.PathLike[str], *more: str, **sbatch: Value
) -> HetJob:
    """Submits a run as `yatt submit` does.

    Args:
        config: path of the run file.
        site: path of the site file.
        more: overlay files (``*.yaml``) and ``section.key=value``, as on the command line.
        sbatch: keys of the site file, and options of sbatch (``mail_type`` for ``--mail-type``).

    Returns:
        submitit's job. `job.result()` returns the run folder once the run is finished, and raises submitit's
        FailedJobError with the reason if the run ends in any other way. `job.state` is Slurm's job state.

    Raises:
        ConfigError: the run file, the site file or the cluster does not fit, or the run is finished;
            nothing was queued.
        DeadlineExceeded: Slurm does not answer.
    """
    run = load_command(Path(config), more)
    where = with_settings(load_site(Path(site)), [_setting(key, value) for key, value in sbatch.items()])
    job = submit_job(with_store(completed(run), where), where)
    if job is None:
        raise ConfigError(f"{run.run.dir} is finished: nothing was queued.")
    return job


def _setting(key: str, value: Value) -> str:
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    own = {field.name for field in fields(SiteConfig)}
    return f"{key}={text}" if key in own else f"sbatch_args.{key.replace('_', '-')}={text}"
