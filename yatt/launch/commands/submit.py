"""`yatt submit`: checks a run and the cluster, then submits the run as one job that requeues itself."""

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from submitit.helpers import clean_env

from yatt.adapters.files.files import read_or_none, write_atomically
from yatt.adapters.run_folder.ledger import run_is_finished, started_attempts
from yatt.adapters.slurm.job_note import note_job, noted_job, only_submitter
from yatt.adapters.slurm.slurm import Slurm
from yatt.config.load import resolved_text, without_secrets
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig
from yatt.errors import EXIT_FINISHED, AlreadyGoing, ConfigError, DeadlineExceeded
from yatt.launch.attempt.jobcall import run_job
from yatt.launch.checks.preflight import check_preflight, show_doubts
from yatt.launch.commands.executor import HetExecutor, HetJob, shell_line, template_of
from yatt.launch.diagnose.report import demands_of, findings_about, folder_findings, take_snapshot
from yatt.launch.diagnose.settings import starts_het_jobs
from yatt.launch.diagnose.variables import variable_findings
from yatt.launch.diagnose.versions import findings_here
from yatt.launch.folder.folder import check_folder, open_folder
from yatt.launch.folder.jobs import job_view
from yatt.launch.folder.known import remember_run
from yatt.launch.folder.occupied import make_way
from yatt.launch.node.steps import step_orders
from yatt.launch.resolve.asking import HOLD_SIGNALS, component_options, more_options, setup_lines
from yatt.launch.resolve.plan import Component, JobPlan, components_of, job_layout, write_plan
from yatt.launch.resolve.resolved import Resolved, resolve_config
from yatt.launch.resolve.site_defaults import are_engines_here
from yatt.paths import RunPaths

SHOWN_ATTEMPT = 1


def submit_run(
    config: RunConfig, site: SiteConfig, *, dry_run: bool, take_over: bool = False, after: str = ""
) -> int:
    """Submits a new run, or the next job of an existing run.

    Args:
        take_over: if the run is active, let it save and stop first.
        after: id of a job that has to end before this one starts.

    Raises:
        ConfigError: the run file, the site file or the cluster does not fit; nothing was queued.
    """
    resolved = resolve_config(config, site)
    if dry_run:
        return show_job(resolved.config, _checked(resolved, may_lack_slurm=True), after)
    submit_job(resolved, take_over=take_over, after=after)
    return EXIT_FINISHED


def submit_job(resolved: Resolved, *, take_over: bool = False, after: str = "") -> HetJob | None:
    """Like `submit_run`; returns submitit's job, None if the run is finished."""
    config = resolved.config
    paths = check_folder(config)
    if paths.config.is_file() and run_is_finished(paths):
        say_over(paths)
        return None
    if not take_over:
        make_way(paths, take_over=False)  # before checks that take long; again after them
    plan = _checked(resolved)
    make_way(paths, take_over=take_over)
    is_new = not paths.root.exists()
    return queue_job(open_folder(config, starts_now=False), config, plan, is_new=is_new, after=after)


def say_over(paths: RunPaths) -> int:
    """Says that a run is finished; returns the exit code."""
    sys.stdout.write(f"{paths.root} is finished: nothing to do\n")
    return EXIT_FINISHED


def prepare_run(config: RunConfig, site: SiteConfig) -> int:
    """Prepares the run folder for the user's own job script, and submits nothing.

    Raises:
        ConfigError: see `submit_run`.
    """
    resolved = resolve_config(config, site)
    config, name = resolved.config, f"yatt-{resolved.config.run.id}"
    plan = msgspec.structs.replace(_checked(resolved), by_hand=name)
    paths = open_folder(config, starts_now=False)
    write_plan(paths, plan)
    remember_run(paths.root)
    script = "train.sbatch" if plan.layout == "flat" else "train-het.sbatch"
    sys.stdout.write(
        f"{paths.root} is ready; submit it with: sbatch --job-name={name} slurm/{script} {paths.root}\n"
    )
    return 0


def _checked(resolved: Resolved, *, may_lack_slurm: bool = False) -> JobPlan:
    check_preflight(resolved.config, runs_here=False, engines_are_here=are_engines_here(resolved.site))
    show_doubts(resolved.config)
    return plan_job(resolved, may_lack_slurm=may_lack_slurm)


def plan_job(resolved: Resolved, *, may_lack_slurm: bool = False) -> JobPlan:
    """Returns the job plan, after checking that the cluster can run it.

    Args:
        may_lack_slurm: where no controller answers, the plan is for a cluster that starts heterogeneous jobs,
            and a note says that nothing of the cluster was checked.
    """
    wanted, site = resolved.of_attempt, resolved.site
    template_of(site)  # report a bad template before anything is created
    snapshot = take_snapshot(Slurm())
    if may_lack_slurm and snapshot.config is None:
        sys.stderr.write("yatt: note: no Slurm controller answers here: nothing of the cluster was checked\n")
        return _plan(resolved, job_layout(wanted, site, can_het=True))
    found = findings_about(snapshot, site, demands_of(wanted))
    found += folder_findings(site, wanted, nodes=snapshot.nodes)
    found += [*findings_here(site), *variable_findings(site, wanted, os.environ)]
    if faults := [finding for finding in found if finding.level == "fail"]:
        raise ConfigError(heading="nothing was queued:", findings=faults)
    for finding in found:
        if finding.level == "warn":
            sys.stderr.write(f"yatt: warning: {finding.in_words()}\n")
    return _plan(resolved, job_layout(wanted, site, can_het=starts_het_jobs(snapshot.config or {})))


def _plan(resolved: Resolved, layout: str) -> JobPlan:
    made = secrets.token_hex(4)
    return JobPlan(submission=made, layout=layout, site=resolved.site, resized=resolved.resized)


def executor_of(paths: RunPaths, config: RunConfig, plan: JobPlan, after: str = "") -> HetExecutor:
    """Returns submitit's executor for the plan; `after` as in `submit_run`."""
    site = plan.site
    parts = components_of(plan.attempt_config(config), site, plan.layout)
    names = {"job_name": f"yatt-{paths.root.name}", "comment": str(paths.root)}
    executor = executor_for(paths, site, "run", parts, requeue=site.requeue != "chain", **names)
    if after:
        executor.add_dependency(f"afterany:{after}")
    return executor


def executor_for(
    paths: RunPaths, site: SiteConfig, work: str, parts: Sequence[Component], *, requeue: bool, **names: str
) -> HetExecutor:
    """Returns submitit's executor for a job of these components.

    Args:
        work: run or join.
        requeue: whether Slurm may start the job again by itself.
        names: job_name and comment.
    """
    executor = HetExecutor(paths, work, [_asked_of(part, site) for part in parts], site, requeue=requeue)
    shared: dict[str, Any] = {
        "time": site.time_limit_min,
        "setup": [HOLD_SIGNALS, *setup_lines(site)],
        "signal_delay_s": site.signal_lead_s,
        "stderr_to_stdout": True,
        **names,
    }
    executor.update_parameters(wckey=None, **shared)
    return executor


def _asked_of(part: Component, site: SiteConfig) -> dict[str, Any]:
    """Returns one component's sbatch parameters, under submitit's names."""
    options = component_options(site, part.name, nodes=part.nodes, gpus_per_node=part.gpus_per_node)
    asked: dict[str, Any] = {key.replace("-", "_"): _flag(value) for key, value in options.items()}
    more = more_options(site, part.name, is_leader=part.first == 0)
    return {**asked, "additional_parameters": {key: _flag(value) for key, value in more.items()}}


def _flag(value: str | None) -> str | bool:
    return True if value is None else value


def queue_job(
    paths: RunPaths, config: RunConfig, plan: JobPlan, *, is_new: bool = False, after: str = ""
) -> HetJob:
    """Submits a job of the run, unless it has an active job; returns submitit's job.

    Args:
        is_new: the folder was made for this submission; it is removed if sbatch refuses the job.

    Raises:
        ConfigError, DeadlineExceeded: see `HetExecutor`.
    """
    slurm = Slurm()
    with only_submitter(paths):
        _check_has_none(paths, slurm)
        before = read_or_none(paths.plan)
        write_plan(paths, plan)
        executor = executor_of(paths, config, plan, after)
        try:
            with submitting_outside_jobs():
                job: HetJob = executor.submit(run_job, str(paths.root))
        except ConfigError:
            write_atomically(paths.plan, before) if before else paths.plan.unlink()
            if is_new and noted_job(paths) is None and not started_attempts(paths):
                shutil.rmtree(paths.root)
            raise
        note_job(paths, job.job_id, slurm.show_job(job.job_id))
    remember_run(paths.root)
    sys.stdout.write(
        f"submitted job {job.job_id} ({plan.layout}) in {paths.root}\n"
        f"  yatt status {paths.root}\n  yatt logs -f {paths.root}\n  yatt cancel {paths.root}\n"
    )
    return job


def _check_has_none(paths: RunPaths, slurm: Slurm) -> None:
    found = job_view(paths, slurm)
    if found.is_alive:
        raise AlreadyGoing(
            f"job {found.job_id} of this run is {found.state} already; see `yatt status {paths.root}`. "
            f"To submit with other settings, run `yatt cancel {paths.root}` first."
        )
    if found.state == "UNKNOWN":
        raise DeadlineExceeded(
            f"Slurm does not report whether job {found.job_id} of this run is active; nothing was queued. "
            "Try again."
        )


@contextlib.contextmanager
def submitting_outside_jobs() -> Iterator[None]:
    """Removes an outer job's variables while submitting; SLURM_CONF, which names the cluster, stays."""
    kept = {key: value for key, value in os.environ.items() if key == "SLURM_CONF"}
    with clean_env():
        os.environ.update(kept)
        yield


def show_job(config: RunConfig, plan: JobPlan, after: str) -> int:
    """Prints everything that submitting would create, and creates nothing."""
    paths = RunPaths(Path(config.run.dir))
    wanted = plan.attempt_config(config)
    parts = components_of(wanted, plan.site, plan.layout)
    lines = ["# ---- the batch script", executor_of(paths, config, plan, after).text().rstrip()]
    lines += [
        "",
        "# ---- its steps: one srun per component, one controller per node (attempt 1 as an example)",
    ]
    for order in step_orders(parts, plan.site, None, paths, attempt=SHOWN_ATTEMPT):
        lines.append(shell_line(order.argv))
    lines += ["", "# ---- the run's resolved config", resolved_text(without_secrets(wanted)).rstrip()]
    lines += ["", "# ---- the site", resolved_text(plan.site).rstrip()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
