"""submitit with support for heterogeneous jobs. Its folder layout, job states, logs and results are
unchanged.

It submits one launcher (`yatt.launch.attempt.job`), which runs once, in the batch script of component 0, and
starts the job's steps itself.
"""

import itertools
import shlex
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from submitit.core import core
from submitit.slurm import slurm

from yatt.adapters.slurm.sbatch import submit_once
from yatt.adapters.slurm.slurm import LIVING_STATES, Reply, Slurm, merged_state
from yatt.config.site import SiteConfig, keeps_job
from yatt.errors import ConfigError, DeadlineExceeded
from yatt.launch.commands.batch import MOST_TIMEOUTS
from yatt.paths import RunPaths

DIRECTIVES, COMMAND = "@DIRECTIVES@", "@COMMAND@"
"""Placeholder lines in a site's template: for the #SBATCH lines, and for the setup lines with the
launcher."""

PASSING_STATES = {"PREEMPTED", "NODE_FAIL"}
"""States that a job passes through before the next start of a requeued job."""


class HetWatcher(slurm.SlurmInfoWatcher):  # type: ignore[misc]
    """Job states from Slurm's controller, also for jobs with several components, and without slurmdbd."""

    def update(self) -> None:
        """Updates the state of every job that has not ended."""
        self._num_calls += 1
        self._last_status_check = core._time.time()
        for job_id in sorted(self._registered - self._finished):
            components = Slurm().show_job(job_id)
            if components:
                names = ",".join(fields.get("NodeList", "") for fields in components)
                info = {"JobID": job_id, "State": merged_state(components), "NodeList": names}
                self._info_dict[job_id] = info
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job has ended and will not be requeued."""
        state = (self.get_info(job_id, mode=mode).get("State") or "UNKNOWN").upper()
        return state not in LIVING_STATES | PASSING_STATES | {"UNKNOWN"}


class HetJob(slurm.SlurmJob):  # type: ignore[misc]
    """A submitted run."""

    watcher = HetWatcher(delay_s=30)


class HetExecutor(slurm.SlurmExecutor):  # type: ignore[misc]
    """Submits one callable as the batch script of a job of one or more components.

    Args:
        paths: the run's; files go to its folder for submitit.
        work: what the job does, run or join (`yatt.launch.commands.batch`).
        components: sbatch parameters per component, under submitit's names; pass shared ones to
            update_parameters.
        site: has the script's template and interpreter, and whether the job continues after the loss of a
            node (--no-kill).
        requeue: whether Slurm may start the job again by itself.

    Raises:
        ConfigError: see `template_of`.
    """

    job_class = HetJob

    def __init__(
        self, paths: RunPaths, work: str, components: list[dict[str, Any]], site: SiteConfig, *, requeue: bool
    ) -> None:
        # exec: Python must be the batch script's own process, because the warning signal would kill bash.
        super().__init__(paths.submitit, max_num_timeout=MOST_TIMEOUTS)
        self.python: str = f"exec {shlex.quote(site.python or sys.executable)} -P"
        self._work = (work, str(paths.root))
        self._components, self._requeue, self._template = components, requeue, template_of(site)
        self._keeps_job = keeps_job(site)
        self._script: Path | None = None

    @classmethod
    def affinity(cls) -> int:
        """Makes no condition: the script can be shown where there is no Slurm, and `submit` says what is
        missing."""
        return 2

    def add_dependency(self, dependency: str) -> None:
        """Adds a dependency to the site's; it applies to the whole job, so it goes to the first component."""
        more = self._components[0].setdefault("additional_parameters", {})
        more["dependency"] = ",".join(filter(None, [str(more.get("dependency", "")), dependency]))

    def text(self) -> str:
        """Returns the batch script that submitting would use."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> HetJob:
        """Submits one job, as submitit does.

        Raises:
            ConfigError: sbatch refused it; the files of this submission are removed.
            DeadlineExceeded: Slurm does not say whether the job is queued. The files stay: it may be.
        """
        before = set(self.folder.glob("*.pkl"))
        try:
            job: HetJob = super().submit(fn, *args, **kwargs)
        except ConfigError:
            # Files of jobs have names with an underscore.
            mine = {file for file in self.folder.glob("*.pkl") if "_" not in file.name} - before
            for file in (*mine, *([self._script] if self._script else [])):
                file.unlink(missing_ok=True)
            raise
        return job

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -u -m yatt.launch.commands.batch {shlex.join(self._work)}"

    def _num_tasks(self) -> int:
        return 1

    def _submit_command(self, command: str) -> HetJob:
        script = self._script = self.folder / f".submission_file_{uuid.uuid4().hex}.sh"
        script.write_text(self._make_submission_file_text(command, ""))
        reply = submit_once(Slurm(), script)
        if reply.code != 0:
            raise refusal_of(reply)
        job: HetJob = self.job_class(folder=self.folder, job_id=reply.out, tasks=[0])
        job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002 - submitit's
        blocks = [self._block(parameters, command) for parameters in self._components]
        head: list[str] = []
        for number, block in enumerate(blocks):
            head += ["#SBATCH hetjob"] if number else []
            head += [line for line in block if line.startswith("#SBATCH")]
        body = [line for line in blocks[0][1:] if not line.startswith(("#SBATCH", "# Parameters"))]
        if not self._template:
            return "\n".join(["#!/bin/bash", "", *head, *body])
        parts = {DIRECTIVES: head, COMMAND: body}
        lines = (parts.get(line.strip(), [line]) for line in self._template.splitlines())
        return "\n".join([*itertools.chain.from_iterable(lines), ""])

    def _block(self, parameters: dict[str, Any], command: str) -> list[str]:
        both = {**self.parameters, **parameters}
        extra = {**both.pop("additional_parameters", {})}
        extra["signal"] = f"B:USR2@{both.get('signal_delay_s', 90)}"
        extra["requeue" if self._requeue else "no-requeue"] = True
        if self._keeps_job:
            extra["no-kill"] = True
        text: str = slurm._make_sbatch_string(
            command=command, folder=self.folder, **both, additional_parameters=extra, use_srun=False
        )
        return text.splitlines()


def refusal_of(reply: Reply) -> ConfigError | DeadlineExceeded:
    """Returns the error for sbatch's reply: DeadlineExceeded if the job may be queued in spite of it."""
    if reply.is_unreachable:
        return DeadlineExceeded(
            f"sbatch gave no useful answer ({reply.says}). If the job is queued, it will run: `yatt status` "
            "shows it, and `yatt submit` does not queue a second one."
        )
    return ConfigError(f"sbatch refused the job, nothing was queued: {reply.says}")


def template_of(site: SiteConfig) -> str:
    """Returns the site's own batch script, empty if it has none.

    Raises:
        ConfigError: it cannot be read, or lacks a placeholder line.
    """
    if not site.template:
        return ""
    try:
        text = Path(site.template).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"site template: {site.template} cannot be read ({why}).") from error
    lines = [line.strip() for line in text.splitlines()]
    for marker in (DIRECTIVES, COMMAND):
        if lines.count(marker) != 1:
            raise ConfigError(
                f"site template: {site.template} has {lines.count(marker)} lines {marker}; write exactly "
                f"one. {DIRECTIVES} is replaced by the #SBATCH lines, {COMMAND} by the setup lines and the "
                "launcher."
            )
    if not text.startswith("#!"):
        raise ConfigError(f"site template: {site.template} does not begin with #!, which sbatch requires.")
    before = lines[: lines.index(DIRECTIVES)]
    if code := next((line for line in before if line and not line.startswith("#")), ""):
        raise ConfigError(
            f"site template: {site.template} has the command '{code}' before {DIRECTIVES}; move it below: "
            "sbatch ignores #SBATCH lines after a command."
        )
    return text


def shell_line(words: tuple[str, ...]) -> str:
    """Returns the command as one would type it in a shell."""
    return shlex.join(words)
