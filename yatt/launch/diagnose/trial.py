"""`yatt diagnose --nodes N`: a short job that starts its step as a run's job does.

It uses the same sbatch options, setup lines, srun and container, so its findings hold for a run. The task on
each node is `yatt.launch.diagnose.probe`. Nodes and this process exchange files in a shared folder.
"""

import os
import re
import secrets
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from yatt import clock
from yatt.adapters.files.files import make_private, read_or_none, write_atomically
from yatt.adapters.files.shared_folder import Report
from yatt.adapters.processes.process import log_tail
from yatt.adapters.slurm.slurm import Reply, Slurm, environment_outside_jobs, merged_state
from yatt.config.site import SiteConfig
from yatt.launch.diagnose.probe import NodeFacts, TrialOrder
from yatt.launch.diagnose.records import Demand
from yatt.launch.resolve.asking import as_arguments, component_options, more_options, setup_lines
from yatt.launch.resolve.plan import Component

QUEUE_S, TRIAL_S, LOOK_S = 60.0, 180.0, 0.5
_NOT_OVER = ("RUNNING", "COMPLETING", "CONFIGURING")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of the test job. `problem`: why the job did not run to its end."""

    facts: tuple[NodeFacts, ...]
    report: Report | None
    problem: str = ""


def try_nodes(site: SiteConfig, demand: Demand, folder: Path, local: tuple[str, str]) -> Trial:
    """Runs a job with one task on each of `demand.nodes` nodes, and collects their reports.

    Args:
        folder: an existing folder that all nodes see.
        local: the scratch and the shared-memory folder.
    """
    slurm = Slurm(environment_outside_jobs(os.environ), limit_s=QUEUE_S)
    meeting = folder / f".yatt-probe-{secrets.token_hex(4)}"
    make_private(meeting)
    try:
        write_atomically(meeting / "order.json", msgspec.json.encode(_order(site, demand, local)))
        write_atomically(meeting / "job.sh", _script(site, meeting).encode())
        problem = _run(slurm, site, demand, meeting)
        texts = [text for index in range(demand.nodes) if (text := read_or_none(meeting / f"facts-{index}"))]
        report = read_or_none(meeting / "report")
        return Trial(
            facts=tuple(msgspec.json.decode(text, type=NodeFacts) for text in texts),
            report=msgspec.json.decode(report, type=Report) if report else None,
            problem=problem,
        )
    finally:
        shutil.rmtree(meeting, ignore_errors=True)


def _order(site: SiteConfig, demand: Demand, local: tuple[str, str]) -> TrialOrder:
    gpus = demand.gpus_per_node if site.gpus_directive != "none" else 0
    part = Component(name=demand.component, first=0, nodes=demand.nodes, gpus_per_node=gpus)
    return TrialOrder(site=site, component=part, folders=local)


def _script(site: SiteConfig, meeting: Path) -> str:
    task = shlex.join(
        [site.python or sys.executable, "-P", "-m", "yatt.launch.diagnose.probe", "batch", str(meeting)]
    )
    return "\n".join(["#!/bin/bash", *setup_lines(site), f"exec {task}", ""])


def _run(slurm: Slurm, site: SiteConfig, demand: Demand, meeting: Path) -> str:
    """Submits the job, waits for it and cancels it; returns the problem, or ''."""
    options = component_options(
        site, demand.component, nodes=demand.nodes, gpus_per_node=demand.gpus_per_node
    )
    options |= more_options(site, demand.component, is_leader=True)
    options |= {"time": "5", "job-name": "yatt-diagnose", "output": str(meeting / "log"), "no-requeue": None}
    reply = slurm.call("sbatch", "--parsable", *as_arguments(options), str(meeting / "job.sh"))
    if reply.code != 0 or (match := re.match(r"\d+", reply.out)) is None:
        return reply.says
    try:
        return _wait(slurm, match[0], meeting)
    finally:
        slurm.call("scancel", match[0])  # has no effect on a job that has ended


def _wait(slurm: Slurm, job_id: str, meeting: Path) -> str:
    began_s = clock.monotonic_s()
    while True:
        job = slurm.show_job(job_id)
        state = merged_state(job) if job else "UNKNOWN" if job is None else "COMPLETED"
        if state == "COMPLETED":
            return ""
        is_waiting, passed_s = state in ("PENDING", "UNKNOWN"), clock.monotonic_s() - began_s
        if is_waiting and passed_s > QUEUE_S:
            reason = job[0].get("Reason", "") if job else "Slurm does not answer"
            return f"it did not start within {QUEUE_S:g} s ({reason})."
        if not is_waiting and state not in _NOT_OVER:
            return f"{state}: {_last_words(meeting)}"
        if passed_s > QUEUE_S + TRIAL_S:
            return f"it did not end within {TRIAL_S:g} s: {_last_words(meeting)}"
        time.sleep(LOOK_S)


def _last_words(meeting: Path) -> str:
    log = meeting / "log"
    said = log_tail(log, lines=3) if log.exists() else ""
    return Reply(1, "", said).says if said else "its log is empty."
