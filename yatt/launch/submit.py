"""`yatt submit`: checks a run and the cluster, then submits the run as one job that keeps itself going."""

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import clean_env

from yatt.adapters.files import publish, read_or_none
from yatt.adapters.ledger import run_is_finished
from yatt.adapters.slurm import Reply, Slurm
from yatt.config.load import resolved_text
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig
from yatt.errors import EXIT_FINISHED, ConfigError, DeadlineExceeded
from yatt.launch.asking import resources
from yatt.launch.diagnose import demands_of, findings, folder_findings, take_snapshot
from yatt.launch.executor import HetExecutor, shell_line
from yatt.launch.folder import check_folder, completed, open_existing, open_folder
from yatt.launch.jobcall import run_job
from yatt.launch.jobs import job_view
from yatt.launch.known import remember
from yatt.launch.occupied import make_way
from yatt.launch.plan import Component, JobPlan, Resized, components_of, effective, layout_of, write_plan
from yatt.launch.preflight import preflight, show_doubts
from yatt.launch.steps import step_orders
from yatt.paths import RunPaths

SHOWN_EPOCH = 1


def submit_run(config: RunConfig, site: SiteConfig, *, dry_run: bool, take_over: bool = False) -> int:
    """Submit a new run, or the next job of one that is there.

    Args:
        take_over: if the run is going on, let it save and stop first.

    Raises:
        ConfigError: something of the user's or the site's is in the way; nothing was queued.
    """
    config, plan = _checked(config, site)
    if dry_run:
        return _show(config, plan)
    make_way(check_folder(config), take_over=take_over)
    is_new = not Path(config.run.dir).exists()
    paths = open_folder(config, starts_now=False)
    try:
        return _submit(paths, config, plan)
    except ConfigError:
        if is_new:  # with another config the next try would be refused for this one's sake
            shutil.rmtree(paths.root)
        raise


def prepare_run(config: RunConfig, site: SiteConfig) -> int:
    """Make the run folder ready for a job script of the user's own, and submit nothing.

    Raises:
        ConfigError: as `submit_run`.
    """
    config, plan = _checked(config, site)
    paths = open_folder(config, starts_now=False)
    write_plan(paths, plan)
    remember(paths.root)
    script = "train.sbatch" if plan.layout == "flat" else "train-het.sbatch"
    sys.stdout.write(f"{paths.root} is ready: sbatch slurm/{script} {paths.root}\n")
    return 0


def _checked(config: RunConfig, site: SiteConfig) -> tuple[RunConfig, JobPlan]:
    config = _with_store(completed(config), site)
    preflight(config, runs_here=False)
    show_doubts(config)
    return config, _plan(config, site, Resized())


def resume_submitted(
    folder: Path, site: SiteConfig, resized: Resized, *, dry_run: bool, take_over: bool = False
) -> int:
    """Submit another job of the run in `folder`; `take_over` as in `submit_run`.

    Raises:
        ConfigError: as `submit_run`.
    """
    paths, config = open_existing(folder)
    if run_is_finished(paths):
        sys.stdout.write(f"{paths.root} is finished: nothing to do\n")
        return EXIT_FINISHED
    preflight(config, runs_here=False)
    plan = _plan(config, site, resized)
    if dry_run:
        return _show(config, plan)
    make_way(paths, take_over=take_over)
    return _submit(paths, config, plan)


def _with_store(config: RunConfig, site: SiteConfig) -> RunConfig:
    """Checkpoints go to a place of the run's own in the site's object store, unless it names another."""
    if config.checkpoint.url or not site.checkpoint_url_prefix:
        return config
    url = f"{site.checkpoint_url_prefix.rstrip('/')}/{Path(config.run.dir).name}-{config.run.id}"
    options = {**site.storage_options, **config.checkpoint.storage_options}
    return replace(config, checkpoint=replace(config.checkpoint, url=url, storage_options=options))


def _plan(config: RunConfig, site: SiteConfig, resized: Resized) -> JobPlan:
    """What is to be submitted, once the cluster was asked whether it can run."""
    wanted = effective(config, site, resized)
    snapshot = take_snapshot(Slurm())
    found = findings(snapshot, site, demands_of(wanted))
    found += folder_findings(site, wanted, nodes=snapshot.nodes)
    if faults := [finding for finding in found if finding.level == "fail"]:
        listed = "\n".join(f"  {f.about}: {f.what} {f.cure}" for f in faults)
        raise ConfigError(f"nothing was queued:\n{listed}")
    for finding in found:
        if (finding.level, finding.about) == ("warn", "run.dir"):
            sys.stderr.write(f"yatt: warning: {finding.what} {finding.cure}\n")
    is_backfill = (snapshot.config or {}).get("SchedulerType") == "sched/backfill"
    layout = layout_of(wanted, site, can_het=is_backfill)
    return JobPlan(submission=secrets.token_hex(4), layout=layout, site=site, resized=resized)


def executor_of(paths: RunPaths, config: RunConfig, plan: JobPlan) -> HetExecutor:
    """submitit's executor for the plan."""
    site = plan.site
    wanted = effective(config, site, plan.resized)
    parts = components_of(wanted, site, plan.layout)
    executor = HetExecutor(
        paths.submitit, [_asked_of(part, site) for part in parts], requeue=site.requeue != "chain"
    )
    shared: dict[str, Any] = {
        "job_name": f"yatt-{paths.root.name}", "time": site.time_limit_min, "setup": list(site.setup),
        "signal_delay_s": site.signal_lead_s, "stderr_to_stdout": True, "comment": str(paths.root),
    }  # fmt: skip
    executor.update_parameters(wckey=None, **shared)
    return executor


def _asked_of(part: Component, site: SiteConfig) -> dict[str, Any]:
    """One component's sbatch parameters, under submitit's names."""
    options = resources(site, part.name, nodes=part.nodes, gpus_per_node=part.gpus_per_node)
    return {key.replace("-", "_"): True if value is None else value for key, value in options.items()}


def _submit(paths: RunPaths, config: RunConfig, plan: JobPlan) -> int:
    alive = job_view(paths, Slurm())
    if alive.is_alive:
        raise ConfigError(
            f"job {alive.job_id} of this run is {alive.state} already: `yatt status {paths.root}`. "
            f"To begin anew with other settings, `yatt cancel {paths.root}` first."
        )
    before, files = read_or_none(paths.plan), set(paths.submitit.glob("*"))
    write_plan(paths, plan)
    executor = executor_of(paths, config, plan)
    try:
        with _outside_of_jobs():
            job = executor.submit(run_job, str(paths.root))
    except (FailedJobError, FailedSubmissionError) as error:
        refusal = _refusal(str(error))
        publish(paths.plan, before) if before else paths.plan.unlink()
        for file in set(paths.submitit.glob("*")) - files:
            file.unlink()
        raise refusal from error
    publish(paths.job, f"{job.job_id}\n".encode())
    remember(paths.root)
    sys.stdout.write(
        f"submitted job {job.job_id} ({plan.layout}) in {paths.root}\n"
        f"  yatt status {paths.root}\n  yatt logs -f {paths.root}\n  yatt cancel {paths.root}\n"
    )
    return 0


def _refusal(said: str) -> ConfigError:
    """What to tell of sbatch's last words.

    Raises:
        DeadlineExceeded: there was no answer, so a job may be queued all the same.
    """
    last = (said.strip().splitlines() or ["no reason given"])[-1]
    if Reply(1, "", last).is_unreachable:
        raise DeadlineExceeded(f"no answer to sbatch ({last}): see `squeue --me` before you submit again.")
    return ConfigError(f"sbatch refused the job, nothing was queued: {last}")


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Submitting from inside a job must not hand that job's variables on; which cluster it is stays."""
    kept = {key: value for key, value in os.environ.items() if key == "SLURM_CONF"}
    with clean_env():
        os.environ.update(kept)
        yield


def _show(config: RunConfig, plan: JobPlan) -> int:
    """Print everything that submitting would make, and make nothing."""
    paths = RunPaths(Path(config.run.dir))
    wanted = effective(config, plan.site, plan.resized)
    parts = components_of(wanted, plan.site, plan.layout)
    lines = ["# ---- the batch script", executor_of(paths, config, plan).text().rstrip()]
    lines += [
        "",
        "# ---- what it starts: one srun a component, one controller a node (epoch 1 as an example)",
    ]
    for order in step_orders(parts, plan.site, None, paths, epoch=SHOWN_EPOCH):
        lines.append(shell_line(order.argv))
    lines += ["", "# ---- the run's resolved config", resolved_text(wanted).rstrip()]
    lines += ["", "# ---- the site", resolved_text(plan.site).rstrip()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
