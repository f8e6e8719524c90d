"""yatt in Python: the functions of `import yatt`.

import yatt
config = yatt.load_config("run.yaml", "overlay.yaml", "rollout.n=16")
code = yatt.run(config)                                 # on this machine, until the run ends
job = yatt.submit("run.yaml", "site.yaml", "optimizer.lr=1.0e-6", time_limit_min=30, reservation="course")
folder = job.result()                                   # waits for the run, through all of its starts
rows = yatt.open_run(folder).metrics()
"""

import os
import threading
from dataclasses import fields
from pathlib import Path

import yaml

from yatt.config.load import load_command
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig, load_site, with_settings
from yatt.errors import ConfigError
from yatt.launch.checking import CheckResult, check_run
from yatt.launch.completed import completed
from yatt.launch.data_files import with_made_data
from yatt.launch.executor import HetJob
from yatt.launch.opened import Run
from yatt.launch.start import start_run
from yatt.launch.submit import submit_job, with_store

Value = str | int | float | bool
FilePath = str | os.PathLike[str]


def load_config(file: FilePath, *more: str) -> RunConfig:
    """Returns the config of a run file.

    Args:
        file: path of the run file.
        more: overlay files (``*.yaml``) and ``section.key=value``, as on the command line.

    Raises:
        ConfigError: names every wrong key, its file and line, the rule and what to write instead.
    """
    return load_command(Path(file), more)


def check(config: RunConfig, *, elsewhere: bool = False) -> list[CheckResult]:
    """Says what is wrong with a run, as `yatt check` does; nothing is started.

    Args:
        elsewhere: the run starts on another machine: files that are not here are skipped, not refused.

    Returns:
        What was found, each with its level (fail, note, skip); empty if there is nothing to say.
    """
    return check_run(config, elsewhere=elsewhere)


def run(config: RunConfig, *, take_over: bool = False) -> int:
    """Trains on this machine, as `yatt run` does, until the run ends. Call it in the main thread.

    Args:
        take_over: if the run is active, let it save and stop first.

    Returns:
        The exit code: 0 finished, 75 stopped early, 93 do not restart, 1 any other failure.

    Raises:
        ConfigError: something has to be changed; nothing was started. Also outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "yatt.run listens to signals, which only the main thread can: call it there, or start `yatt run` "
            "as a process, or use yatt.submit."
        )
    return start_run(config, take_over=take_over)


def open_run(folder: FilePath) -> Run:
    """Opens a run folder, of an active run or one that is over; nothing is changed.

    Raises:
        ConfigError: it is not a run folder.
    """
    return Run(Path(folder))


def submit(config: FilePath, site: FilePath, *more: str, **sbatch: Value) -> HetJob:
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
    job = submit_job(with_store(with_made_data(completed(run)), where), where)
    if job is None:
        raise ConfigError(f"{run.run.dir} is finished: nothing was queued.")
    return job


def _setting(key: str, value: Value) -> str:
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    own = {field.name for field in fields(SiteConfig)}
    return f"{key}={text}" if key in own else f"sbatch_args.{key.replace('_', '-')}={text}"
