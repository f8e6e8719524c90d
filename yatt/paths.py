"""Paths of all files in the run folder."""

import hashlib
import os
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from yatt.errors import ConfigError

MOST_NAME = 100  # characters of a name in a file's name


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths inside one run folder (mode 0700)."""

    root: Path

    @property
    def config(self) -> Path:
        """Resolved config at the start of the run; never rewritten."""
        return self.root / "config.yaml"

    @property
    def sealed_config(self) -> Path:
        """The config now, and its changes (`yatt.adapters.run_folder.run_config`)."""
        return self.root / "config.sealed"

    def check_is_run(self) -> None:
        """Checks that a run was started in this folder.

        Raises:
            ConfigError: it is not a run folder.
        """
        if not self.config.exists():
            raise ConfigError(
                f"{self.root} is not a run folder: it has no config.yaml. Give the folder that run.dir names."
            )

    @property
    def keys(self) -> Path:
        """CURVE keys, mode 0600."""
        return self.root / "keys"

    @property
    def folder_id(self) -> Path:
        """The folder's own id, which a checkpoint store records (`yatt.checkpoint.commit.holders`)."""
        return self.root / "folder_id"

    @property
    def claims(self) -> Path:
        """Claims of attempt numbers, one per attempt."""
        return self.root / "claims"

    @property
    def local_commits(self) -> Path:
        """Records of saves that are on the nodes' disks only (`yatt.checkpoint.local.local_commits`)."""
        return self.root / "local_commits"

    @property
    def latest(self) -> Path:
        """Link to the newest attempt, for people."""
        return self.root / "latest"

    @property
    def metrics(self) -> Path:
        """Metrics, one line per iteration."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Events, one per line; the first of its segments (`yatt.adapters.files.segments`)."""
        return self.root / "events.jsonl"

    @property
    def samples(self) -> Path:
        """A few samples per iteration with their verdicts, for the report."""
        return self.root / "samples.jsonl"

    @property
    def rollouts(self) -> Path:
        """Recorded rollouts, by iteration and node (`yatt.obs.rollouts`)."""
        return self.root / "rollouts"

    def rollout_file(self, iteration: int, node: int) -> Path:
        """File of the recorded rollouts of one iteration and one trainer node; the same in each attempt."""
        return self.rollouts / f"{iteration:06d}.{node}.jsonl.gz"

    @property
    def kept_groups(self) -> Path:
        """Finished prompt groups of iterations that no checkpoint covers yet, by controller and attempt."""
        return self.root / "kept_groups"

    def judge_weights(self, genrm: str) -> Path:
        """Weights of other runs that a GenRM takes, and when it has which (`genrms[].refresh`)."""
        name = urllib.parse.quote(genrm, safe="")
        if len(name) > MOST_NAME:
            name = f"{name[:MOST_NAME]}-{hashlib.sha256(genrm.encode()).hexdigest()[:12]}"
        return self.root / "judges" / f"genrm-{name}"

    @property
    def evaluation(self) -> Path:
        """Of an evaluation: what its result is (`yatt.core.figures.evaluation.EvalRequest`)."""
        return self.root / "evaluation.json"

    def evaluated_samples(self, attempt: int, node: int) -> Path:
        """Samples of an evaluation that one trainer node has, in the order of their prompts."""
        return self.attempt(attempt) / "evaluated" / f"{node}.jsonl"

    @property
    def report(self) -> Path:
        """The page of `yatt report`."""
        return self.root / "report.html"

    @property
    def trackers(self) -> Path:
        """Folders of the trackers (`yatt.obs.trackers`)."""
        return self.root / "trackers"

    def tracker(self, name: str) -> Path:
        """A tracker's folder: what its follower keeps, and files of its library. wandb names its own."""
        return self.root / name if name == "wandb" else self.trackers / name

    def tracker_log(self, name: str) -> Path:
        """Output of a tracker's follower."""
        return self.tracker(name) / "follower.log"

    @property
    def model(self) -> Path:
        """The trained policy as a Hugging Face folder, at the end."""
        return self.root / "model"

    @property
    def finished(self) -> Path:
        """Marks a finished run; written last, by the leader."""
        return self.root / "finished"

    def attempt(self, attempt: int) -> Path:
        """Folder of one attempt."""
        return self.root / "attempts" / f"{attempt:06d}"

    def endpoint(self, attempt: int, node: int) -> Path:
        """File in which a controller publishes its endpoint."""
        return self.attempt(attempt) / "endpoints" / f"{node}.json"

    def all_endpoints(self, attempt: int) -> Path:
        """File in which the leader publishes all controllers' endpoints."""
        return self.attempt(attempt) / "endpoints" / "all.json"

    def engine_meeting(self, attempt: int, engine: str) -> Path:
        """File in which rank 0 of an engine that spans nodes publishes where the ranks meet."""
        return self.attempt(attempt) / "endpoints" / "engines" / f"{engine}.json"

    def local(self, attempt: int, node: int, life: int = 1) -> Path:
        """Names of a controller's node-local folders, for their removal after it has ended."""
        return self.attempt(attempt) / "local" / (f"{node}.json" if life == 1 else f"{node}.{life}.json")

    def lost(self, attempt: int, node: int) -> Path:
        """Written by the leader when it declares a controller lost."""
        return self.attempt(attempt) / "lost" / f"{node}.json"

    def life(self, attempt: int, node: int, life: int) -> Path:
        """Claim of one life of an engine node's controller; the first lives are not claimed."""
        return self.attempt(attempt) / "lives" / f"{node}.{life}"

    @property
    def plan(self) -> Path:
        """Plan of the newest submission on Slurm (`yatt.launch.resolve.plan`)."""
        return self.root / "slurm.json"

    @property
    def job(self) -> Path:
        """Id and command of the newest job."""
        return self.root / "job"

    @property
    def kept_off(self) -> Path:
        """Nodes that the last start excluded from the job (`yatt.adapters.slurm.kept_off`)."""
        return self.root / "kept_off"

    @property
    def submitit(self) -> Path:
        """submitit's own files: scripts, pickles and the launcher's output, by job id."""
        return self.root / "submitit"

    def attempt_config(self, attempt: int) -> Path:
        """This attempt's config, if it differs from `config`: other nodes, the site's folders."""
        return self.attempt(attempt) / "config.yaml"

    def heartbeat(self, attempt: int) -> Path:
        """A counter that the leader increments; the dead-man's switch watches it."""
        return self.attempt(attempt) / "heartbeat"

    def claimed_requeue(self, attempt: int, number: int) -> Path:
        """Claim of the controller that requests a requeue; a higher number replaces a dead claimant."""
        return self.attempt(attempt) / "requeue" / f"{number:06d}"

    def controller_record(self, attempt: int, node: int) -> Path:
        """The Slurm node on which a controller was started, and how it ended."""
        return self.attempt(attempt) / "controllers" / f"{node}.json"

    def staged(self, attempt: int, node: int) -> Path:
        """List of the copies that a node has on its own disk in this attempt."""
        return self.attempt(attempt) / "staged" / f"{node}.json"

    def profiles(self, attempt: int) -> Path:
        """Folder of the profiles of trainer ranks; made with the first one."""
        return self.attempt(attempt) / "profiles"

    def log(self, attempt: int, worker: str) -> Path:
        """Log of a process. In a Slurm job its name also has the attempt and the job's restart count."""
        start = (
            f".e{attempt}.r{os.environ.get('SLURM_RESTART_COUNT', '0')}"
            if "SLURM_JOB_ID" in os.environ
            else ""
        )
        return self.attempt(attempt) / "logs" / f"{worker}{start}.log"


def rows_folder(scratch: Path, *, is_held_out: bool) -> Path:
    """Folder in a node's scratch folder for copies of the run's parquet files."""
    return scratch / ("rows-held-out" if is_held_out else "rows")


LOCAL_SOCKET = "local"
"""Name of the local socket in a node's scratch folder."""

LOCAL_NAME_BYTES = len("yatt--") + 10 + 16
"""Longest name of a node-local folder, with uid and 16 random hex digits
(`adapters.node_local.local_folder`)."""
