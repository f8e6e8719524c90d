"""submitit, taught heterogeneous jobs: its folder layout, job states, logs and results stay as they are.

It submits one launcher (`yatt.launch.job`), which runs once, in the batch script of component 0, and starts
the job's steps itself.
"""

import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

from submitit.core import core
from submitit.slurm import slurm

from yatt.adapters.slurm import LIVING_STATES, Slurm, merged_state
from yatt.config.site import SiteConfig
from yatt.errors import ConfigError

DIRECTIVES, COMMAND = "@DIRECTIVES@", "@COMMAND@"
"""Lines of a site's template: where the #SBATCH lines go, and the launcher with the site's setup lines."""

PASSING_STATES = {"PREEMPTED", "NODE_FAIL"}
"""Seen on the way to the next start of a requeued job."""


class HetWatcher(slurm.SlurmInfoWatcher):  # type: ignore[misc]
    """States of jobs with several components, from Slurm's controller, so without slurmdbd too."""

    def update(self) -> None:
        """Ask for every job that is not over."""
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
        """Whether the job will not run again by itself."""
        state = (self.get_info(job_id, mode=mode).get("State") or "UNKNOWN").upper()
        return state not in LIVING_STATES | PASSING_STATES | {"UNKNOWN"}


class HetJob(slurm.SlurmJob):  # type: ignore[misc]
    """A submitted run."""

    watcher = HetWatcher(delay_s=30)


class HetExecutor(slurm.SlurmExecutor):  # type: ignore[misc]
    """Submits one callable as the batch script of a job of one or more components.

    Args:
        components: sbatch parameters of each, under submitit's names; shared ones go to update_parameters.
        requeue: whether Slurm may start the job again by itself.
        template: the site's own script, as `template_of` gives it; empty: ours.
        python: the launcher's interpreter; empty: this one.
        keeps_job: whether the job outlives the loss of a node.
    """

    job_class = HetJob

    def __init__(
        self, folder: Path, components: list[dict[str, Any]], *, requeue: bool = True, template: str = "",
        python: str = "", keeps_job: bool = True,
    ) -> None:  # fmt: skip
        # Python must be the batch script's own process: bash would die of the signal it is to get.
        super().__init__(folder, max_num_timeout=10**6)
        self.python: str = f"exec {shlex.quote(python or sys.executable)} -P"
        self._components, self._requeue, self._template = components, requeue, template
        self._keeps_job = keeps_job

    def add_dependency(self, dependency: str) -> None:
        """Beside what the site asks for. It is the job's as a whole, so its first component's."""
        more = self._components[0].setdefault("additional_parameters", {})
        more["dependency"] = ",".join(filter(None, [str(more.get("dependency", "")), dependency]))

    def text(self) -> str:
        """The batch script that submitting would use."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    def _num_tasks(self) -> int:
        return 1

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


def template_of(site: SiteConfig) -> str:
    """The site's own batch script, empty if it has none.

    Raises:
        ConfigError: it cannot be read, or yatt's lines have no place in it.
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
                f"site template: {site.template} has {lines.count(marker)} lines {marker}; write one. "
                f"{DIRECTIVES} becomes the #SBATCH lines, {COMMAND} the site's setup lines and the launcher."
            )
    if not text.startswith("#!"):
        raise ConfigError(f"site template: {site.template} does not begin with #!, as sbatch wants it.")
    before = lines[: lines.index(DIRECTIVES)]
    if code := next((line for line in before if line and not line.startswith("#")), ""):
        raise ConfigError(
            f"site template: {site.template} has '{code}' before {DIRECTIVES}; sbatch stops reading there."
        )
    return text


def shell_line(words: tuple[str, ...]) -> str:
    """For people to read: the command as one would type it."""
    return shlex.join(words)
