"""yatt in Python: the functions of `import yatt`.

import yatt
config = yatt.load_config("run.yaml", "overlay.yaml", "rollout.n=16")
code = yatt.run(config)                             # on this machine, until the run ends
job = yatt.submit("run.yaml", "site.yaml", "optimizer.lr=1.0e-6", time_limit_min=30)
folder = job.result()                               # waits for the run, through all of its starts
rows = yatt.open_run(folder).metrics()
"""

import os
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from yatt.adapters.files.lines import read_records
from yatt.adapters.files.segments import SegmentTail
from yatt.adapters.run_folder.run_config import load_run
from yatt.adapters.slurm.slurm import Slurm
from yatt.config.load import load_command
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig, load_site, with_settings
from yatt.errors import ConfigError, Finding
from yatt.launch.commands.checking import check_run
from yatt.launch.commands.executor import HetJob
from yatt.launch.commands.start import start_run
from yatt.launch.commands.submit import submit_job
from yatt.launch.folder.cancel import cancel_run
from yatt.launch.folder.summary import Summary
from yatt.launch.resolve.resolved import resolve_config
from yatt.obs.metrics import STEP, read_metric_rows
from yatt.obs.rollouts import whole_samples
from yatt.obs.samples import as_sample
from yatt.paths import RunPaths
from yatt.records.events.log import logged_event


class Run:
    """A run folder.

    Args:
        folder: the run folder.

    Raises:
        ConfigError: it is not a run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = RunPaths(folder.absolute())
        self._paths.check_is_run()

    def __repr__(self) -> str:
        return f"<yatt run {self.folder}>"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._paths.root

    @property
    def config(self) -> RunConfig:
        """The run's config as its next attempt has it.

        Raises:
            ConfigError: it cannot be read.
        """
        return load_run(self._paths)

    def status(self) -> dict[str, Any]:
        """Returns what `yatt status --json` prints: state, iteration, reward, goodput, job and so on."""
        return Summary(self._paths).as_json()

    def metrics(self) -> list[dict[str, Any]]:
        """Returns one row per iteration, in order, with verl's names; `training/global_step` counts them."""
        return sorted(read_metric_rows(self._paths.metrics), key=lambda row: row[STEP])

    def metrics_frame(self) -> "pandas.DataFrame":
        """Returns the metrics as a dataframe with the iteration as index.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        rows = self.metrics()
        return pandas.DataFrame(rows, columns=None if rows else [STEP]).set_index(STEP)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields the events of all attempts, oldest first. Files that were deleted by age are missing."""
        tail = SegmentTail(self._paths.events, lambda record: record if logged_event(record) else None)
        for batch in tail.batches():
            yield from batch

    def samples(self, iteration: int | None = None) -> list[dict[str, Any]]:
        """Returns completions with their prompts, scores and verdicts.

        Args:
            iteration: all of this iteration, if `logging.rollouts` is all, else some; None: those that are
                kept for the report, of all iterations.
        """
        if iteration is None:
            return read_records(self._paths.samples, as_sample)[0]
        return list(whole_samples(self._paths, iteration))

    def stop(self, *, now: bool = False) -> str:
        """Lets the run save a checkpoint and stop, as `yatt cancel` does; returns what was done.

        Args:
            now: end a job without saving.

        Raises:
            ConfigError: the run is not active.
        """
        return cancel_run(self._paths, Slurm(), now=now)


if TYPE_CHECKING:
    import pandas

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


def check(config: RunConfig, *, elsewhere: bool = False) -> list[Finding]:
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
    job = submit_job(resolve_config(run, where))
    if job is None:
        raise ConfigError(f"{run.run.dir} is finished: nothing was queued.")
    return job


def _setting(key: str, value: Value) -> str:
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    own = {field.name for field in fields(SiteConfig)}
    return f"{key}={text}" if key in own else f"sbatch_args.{key.replace('_', '-')}={text}"
