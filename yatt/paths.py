"""The run folder: every name in it, in one place.

See DESIGN: `config.yaml keys/ claims/ attempts/ latest metrics.jsonl events.jsonl finished`.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Names inside one run folder (mode 0700)."""

    root: Path

    @property
    def config(self) -> Path:
        """Resolved config; never rewritten."""
        return self.root / "config.yaml"

    @property
    def keys(self) -> Path:
        """CURVE keys, mode 0600."""
        return self.root / "keys"

    @property
    def folder_id(self) -> Path:
        """The folder's own id, by which a checkpoint store knows it (`yatt.checkpoint.holders`)."""
        return self.root / "folder_id"

    @property
    def claims(self) -> Path:
        """One claim a start."""
        return self.root / "claims"

    @property
    def latest(self) -> Path:
        """Link to the newest attempt, for people."""
        return self.root / "latest"

    @property
    def metrics(self) -> Path:
        """One line an iteration."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One line an event; the first of its segments (`yatt.adapters.segments`)."""
        return self.root / "events.jsonl"

    @property
    def samples(self) -> Path:
        """A few completions with their verdicts an iteration, for the report."""
        return self.root / "samples.jsonl"

    @property
    def report(self) -> Path:
        """The page of `yatt report`."""
        return self.root / "report.html"

    @property
    def wandb(self) -> Path:
        """The wandb follower's run id and what wandb itself keeps."""
        return self.root / "wandb"

    @property
    def wandb_log(self) -> Path:
        """The follower's output."""
        return self.wandb / "follower.log"

    @property
    def model(self) -> Path:
        """The trained policy as a Hugging Face folder, at the end."""
        return self.root / "model"

    @property
    def finished(self) -> Path:
        """Written last, by the leader."""
        return self.root / "finished"

    def attempt(self, attempt: int) -> Path:
        """Folder of one attempt."""
        return self.root / "attempts" / f"{attempt:06d}"

    def endpoint(self, attempt: int, node: int) -> Path:
        """Where a controller publishes its endpoint."""
        return self.attempt(attempt) / "endpoints" / f"{node}.json"

    def all_endpoints(self, attempt: int) -> Path:
        """Where the leader publishes all controllers' endpoints."""
        return self.attempt(attempt) / "endpoints" / "all.json"

    def local(self, attempt: int, node: int) -> Path:
        """Names of a controller's node-local folders, for whoever outlives it."""
        return self.attempt(attempt) / "local" / f"{node}.json"

    def lost(self, attempt: int, node: int) -> Path:
        """Written by the leader when it declares a controller lost."""
        return self.attempt(attempt) / "lost" / f"{node}.json"

    @property
    def plan(self) -> Path:
        """How the newest submission runs on Slurm (`yatt.launch.plan`)."""
        return self.root / "slurm.json"

    @property
    def job(self) -> Path:
        """Id of the newest job."""
        return self.root / "job"

    @property
    def kept_off(self) -> Path:
        """The nodes that its last start has kept the job off (`yatt.adapters.kept_off`)."""
        return self.root / "kept_off"

    @property
    def submitit(self) -> Path:
        """submitit's own files: scripts, pickles and the launcher's output, by job id."""
        return self.root / "submitit"

    def attempt_config(self, attempt: int) -> Path:
        """What this attempt runs with, where that is not `config`: other nodes, the site's folders."""
        return self.attempt(attempt) / "config.yaml"

    def heartbeat(self, attempt: int) -> Path:
        """A counter that the leader keeps raising; the dead-man's switch watches it."""
        return self.attempt(attempt) / "heartbeat"

    def claimed_requeue(self, attempt: int, number: int) -> Path:
        """Who asks Slurm to start the job anew; a later number succeeds a claimant that died."""
        return self.attempt(attempt) / "requeue" / f"{number:06d}"

    def controller_record(self, attempt: int, node: int) -> Path:
        """Which Slurm node a controller was started on, and how it ended."""
        return self.attempt(attempt) / "controllers" / f"{node}.json"

    def staged(self, attempt: int, node: int) -> Path:
        """Which copies a node has on its own disk in this attempt."""
        return self.attempt(attempt) / "staged" / f"{node}.json"

    def log(self, attempt: int, worker: str) -> Path:
        """A process's output. In a Slurm job its name has the attempt and the job's restart count as well."""
        start = (
            f".e{attempt}.r{os.environ.get('SLURM_RESTART_COUNT', '0')}"
            if "SLURM_JOB_ID" in os.environ
            else ""
        )
        return self.attempt(attempt) / "logs" / f"{worker}{start}.log"


def rows_folder(scratch: Path, *, is_held_out: bool) -> Path:
    """Copies of the run's parquet files, in a node's scratch folder."""
    return scratch / ("rows-held-out" if is_held_out else "rows")


HUB = "hub"
"""The socket in a node's scratch folder."""

LOCAL_NAME_BYTES = len("yatt--") + 10 + 16
"""Longest name of a node-local folder: a user's number and 16 random hex digits (`adapters.local_folder`)."""
