"""How one start of a Slurm job is succeeded by the next, exactly once.

Whoever wants it (the launcher, or a surviving controller) first claims it in the shared folder, then asks
Slurm to requeue the job; a site that forbids that gets a successor job that waits for this one (afterany).
A refusal is looked into first: Slurm refuses as well when somebody else has requeued the job just now.
"""

import logging
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from yatt.adapters.files import claim, make_within, sealed
from yatt.adapters.job_note import note_job, noted_job
from yatt.adapters.kept_off import KeptOff
from yatt.adapters.patience import patiently
from yatt.adapters.slurm import Fields, Reply, Slurm, children_without_term
from yatt.core.deadman import Job
from yatt.errors import ConfigError, FolderGone
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
_JOB_ID = re.compile(r"^(\d+)")
_ENDING = {"COMPLETING", "FAILED", "OUT_OF_MEMORY"}
SHELL_ADDS = 128
SIGNALS = 64
"""So many there are: 255 is no signal's, but of ssh and of those who end with -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """One start of a job, and how it is succeeded.

    Attributes:
        restarts: SLURM_RESTART_COUNT of this start.
        mode: auto, requeue or chain, as in the site file.
    """

    paths: RunPaths
    attempt: int
    job_id: str
    restarts: int
    mode: str = "auto"
    slurm: Slurm = field(default_factory=Slurm)

    @classmethod
    def of_this_start(cls, paths: RunPaths, attempt: int, mode: str) -> "Requeue":
        """Of the start that this process belongs to."""
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return cls(
            paths=paths, attempt=attempt, job_id=os.environ["SLURM_JOB_ID"], restarts=restarts, mode=mode
        )

    def can_ask(self) -> bool:
        """Whether Slurm can be asked from here at all. Looks for its command in the folders of PATH."""
        return self.slurm.has_scontrol

    def state(self) -> Job:
        """Whether Slurm still runs this very start."""
        state = state_of(self.slurm.show_job(self.job_id), self.restarts)
        if state is not Job.DIED:
            return state
        try:
            noted = noted_job(self.paths)
        except OSError:
            return Job.UNKNOWN
        # A successor that was submitted in its place changes nothing of how slowly this one ends.
        return Job.OVER if noted is not None and noted.job != self.job_id else state

    def claim(self, number: int) -> bool | None:
        """Try to be the one who acts; None if the shared folder does not answer."""
        path = self.paths.claimed_requeue(self.attempt, number)
        try:
            make_within(self.paths.root, path.parent)
            return claim(path, sealed({"pid": os.getpid(), "host": os.uname().nodename}, self.attempt))
        except (OSError, ConfigError, FolderGone) as error:
            _LOG.warning("the requeue cannot be claimed: %s", error)
            return None

    def succeed(self, gone: list[str], env: Mapping[str, str]) -> Reply:
        """Ask Slurm for the next start, off the nodes `gone` and those that were found unfit, as far as the
        job can do without them. What it prints is a successor's job id."""
        with children_without_term():
            return self._succeed(gone, env)

    def _succeed(self, gone: list[str], env: Mapping[str, str]) -> Reply:
        if self.mode != "chain":
            reply = self.slurm.requeue(self.job_id)
            if reply.code == 0:
                KeptOff(self.paths, self.slurm).renew(self.job_id, gone, self.attempt)
                return reply
            if reply.is_unreachable:
                return reply
            if (state := self.state()) is Job.OVER:  # another has requeued or ended it
                return Reply(0, "", "")
            if self.mode == "requeue" or state is Job.UNKNOWN:
                return reply
            _LOG.warning("requeue refused (%s); a successor job is submitted instead", reply.says)
        return self._chain(gone, env)

    def _chain(self, gone: list[str], env: Mapping[str, str]) -> Reply:
        """Submit the same script again, to begin when this job has ended."""
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "job.sh"
            written = self.slurm.call("scontrol", "write", "batch_script", self.job_id, str(script))
            if written.code != 0:
                return written
            waits = f"--dependency=afterany:{self.job_id}"
            reply = self.slurm.call("sbatch", "--parsable", waits, str(script))
        if reply.code != 0 or (match := _JOB_ID.match(reply.out)) is None:
            return reply
        # First of all who comes after: whoever else asks for the next start looks there.
        patiently(partial(note_job, self.paths, match[1], [{"Command": str(script)}]))
        if pickles := env.get("SUBMITIT_FOLDER"):
            mine, its = (Path(pickles) / f"{job}_submitted.pkl" for job in (self.job_id, match[1]))
            patiently(partial(shutil.copy2, mine, its))
        KeptOff(self.paths, self.slurm).renew(match[1], gone, self.attempt)
        return Reply(0, match[1], "")


def state_of(components: list[Fields] | None, restarts: int) -> Job:
    """What `scontrol show job` says about the start with this restart count."""
    if components is None:
        return Job.UNKNOWN
    if not components:
        return Job.OVER
    leader = components[0]
    if int(leader.get("Restarts", "0")) != restarts:
        return Job.OVER
    state = leader.get("JobState", "").split(" ")[0]
    if state == "RUNNING":
        return Job.SAME
    return Job.DIED if state in _ENDING and _was_killed(leader.get("ExitCode", "")) else Job.OVER


def _was_killed(exit_code: str) -> bool:
    """Whether Slurm's ``code:signal`` of a batch process is of a signal that neither Slurm nor yatt sends.

    A shell around it makes 128 and the signal a code. Of a job that is cancelled, or has run out of time, it
    is 0:0 while its steps are being ended.
    """
    code, _, signalled = exit_code.partition(":")
    if not (code.isdigit() and signalled.isdigit()):
        return False
    number = int(signalled) or (int(code) - SHELL_ADDS if int(code) <= SHELL_ADDS + SIGNALS else 0)
    return number > 0 and number != signal.SIGTERM
