"""Requests the next start of a Slurm job, exactly once.

The launcher, or a surviving controller, first claims the next start in the shared folder, then requests a
requeue of the job. If the site forbids that, it submits a new job that waits for this one (afterany). A
refusal is checked first: Slurm also refuses if another process has just requeued the job.
"""

import logging
import os
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from yatt.adapters.files.files import create_exclusively, make_within, sealed_record, write_atomically
from yatt.adapters.files.patience import with_retries
from yatt.adapters.slurm.job_note import names_run, note_job, noted_job
from yatt.adapters.slurm.kept_off import KeptOff
from yatt.adapters.slurm.sbatch import submit_once, successor_script
from yatt.adapters.slurm.slurm import Fields, Reply, Slurm, children_without_term
from yatt.core.attempts.deadman import Job
from yatt.errors import ConfigError, FolderGone
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
_ENDING = {"COMPLETING", "FAILED", "OUT_OF_MEMORY"}
SHELL_ADDS = 128
SIGNALS = 64
"""Number of signals: exit code 255 is not a signal's, but that of ssh and of programs that exit with -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """One start of a job, and the request for the next one.

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
        """Returns the object for the start that this process belongs to."""
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return cls(
            paths=paths, attempt=attempt, job_id=os.environ["SLURM_JOB_ID"], restarts=restarts, mode=mode
        )

    def can_ask(self) -> bool:
        """Whether Slurm can be queried from this process: looks for scontrol on the PATH."""
        return self.slurm.has_scontrol

    def state(self) -> Job:
        """Returns whether Slurm still runs this start."""
        state = start_state(self.slurm.show_job(self.job_id), self.restarts)
        if state is not Job.DIED:
            return state
        try:
            noted = noted_job(self.paths)
        except OSError:
            return Job.UNKNOWN
        # If another job was submitted in its place, this start is over, although it is still ending.
        return Job.OVER if noted is not None and noted.job != self.job_id else state

    def claim(self, number: int) -> bool | None:
        """Claims the request; returns None if the shared folder does not answer."""
        path = self.paths.claimed_requeue(self.attempt, number)
        try:
            make_within(self.paths.root, path.parent)
            return create_exclusively(
                path, sealed_record({"pid": os.getpid(), "host": os.uname().nodename}, self.attempt)
            )
        except (OSError, ConfigError, FolderGone) as error:
            _LOG.warning("the requeue cannot be claimed: %s", error)
            return None

    def succeed(self, gone: list[str], env: Mapping[str, str]) -> Reply:
        """Requests the next start from Slurm, excluding the nodes `gone` and unfit nodes as far as the job
        can do without them. The reply's output is the id of a new job, if one was submitted."""
        with children_without_term():
            return self._succeed(gone, env)

    def _succeed(self, gone: list[str], env: Mapping[str, str]) -> Reply:
        if self.mode != "chain":
            reply = self.slurm.requeue(self.job_id)
            # Without an answer, Slurm may have done it, and then ends this start.
            is_done = reply.code == 0 or (reply.is_unreachable and self.state() is Job.OVER)
            if is_done:
                KeptOff(self.paths, self.slurm).renew(self.job_id, gone, self.attempt)
                return Reply(0, "", "")
            if reply.is_unreachable:
                return reply
            if (state := self.state()) is Job.OVER:  # another has requeued or ended it
                return Reply(0, "", "")
            if self.mode == "requeue" or state is Job.UNKNOWN:
                return reply
            _LOG.warning("requeue refused (%s); a successor job is submitted instead", reply.says)
        return self._chain(gone, env)

    def _chain(self, gone: list[str], env: Mapping[str, str]) -> Reply:
        """Submits the same script again, to start when this job has ended. A job has one successor, whose
        script is named after it: so it is found again if sbatch's answer was lost, or this process's."""
        script = self.paths.submitit / f".successor_of_{self.job_id}.sh"
        tried = script.exists()
        if not tried and (refused := self._write_successor(script, env)) is not None:
            return refused
        waits = f"--dependency=afterany:{self.job_id}"
        # People's own scripts want the run as their argument; those of yatt have none.
        reply = submit_once(self.slurm, script, (waits,), (str(self.paths.root),), may_be_queued=tried)
        if reply.code != 0:
            return reply
        # Record it first: other processes that want the next start look there.
        with_retries(partial(note_job, self.paths, reply.out, [{"Command": str(script)}]))
        KeptOff(self.paths, self.slurm).renew(reply.out, gone, self.attempt)
        return reply

    def _write_successor(self, script: Path, env: Mapping[str, str]) -> Reply | None:
        """Writes the successor's script; returns Slurm's reply if it does not give this job's."""
        shown = self.slurm.show_job(self.job_id)
        with_retries(partial(make_within, self.paths.root, script.parent))
        with tempfile.TemporaryDirectory() as folder:
            mine = Path(folder) / "job.sh"
            reply = self.slurm.call("scontrol", "write", "batch_script", self.job_id, str(mine))
            if reply.code != 0:
                return reply
            text = mine.read_text()
        if shown and not names_run(shown[0].get("Command", ""), self.paths.root.absolute()):
            try:
                text = successor_script(text, shown, env)
            except ValueError as error:
                return Reply(1, "", f"no successor can be submitted: {error}")
        with_retries(partial(write_atomically, script, text.encode()))
        return None


def start_state(components: list[Fields] | None, restarts: int) -> Job:
    """Returns the state of the start with this restart count, from `scontrol show job`."""
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
    """Whether Slurm's ``code:signal`` of a batch process names a signal that neither Slurm nor yatt sends.

    A surrounding shell turns it into the exit code 128 + signal. For a job that is cancelled, or out of time,
    it is 0:0 while its steps are being ended.
    """
    code, _, signalled = exit_code.partition(":")
    if not (code.isdigit() and signalled.isdigit()):
        return False
    number = int(signalled) or (int(code) - SHELL_ADDS if int(code) <= SHELL_ADDS + SIGNALS else 0)
    return number > 0 and number != signal.SIGTERM
