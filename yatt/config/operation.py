"""The run file's sections about operation: where and how a run runs, not what it learns.

The other sections, and the whole, are in `yatt.config.schema`.
"""

import re
from dataclasses import dataclass, field
from typing import Literal


def rule(holds: bool, says: str) -> None:
    """Refuse a section: `says` is what is wrong and what to write.

    Raises:
        ValueError: the rule does not hold.
    """
    if not holds:
        raise ValueError(says)


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCheckpointSection:
    """Another run's checkpoint from which this run starts. It is read, never changed."""

    url: str = ""
    """The other run's checkpoint store: a folder or any fsspec URL. Empty: start from `model.path`."""

    storage_options: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Handed to fsspec."""

    iteration: int = 0
    """Which checkpoint; 0 is the newest whole one."""

    take: Literal["weights", "state"] = "weights"
    """weights: fresh optimizer, iteration 0. state: optimizer, schedule, data position and count go on."""

    def __post_init__(self) -> None:
        rule(self.iteration >= 0, "iteration must be 0 (the newest) or more.")
        rule(bool(self.url) or not self.iteration, "iteration is set, but url is empty; name the store.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run itself."""

    dir: str
    """The run folder, on a filesystem every node sees. Relative paths start where the command runs."""

    seed: int = 0
    """Everything random is drawn from (seed, iteration, prompt group, rollout)."""

    deterministic: bool = False
    """Make a killed and resumed run end bit-equal to an undisturbed one; sampling gets slower."""

    max_attempts_without_progress: int = 3
    """After so many attempts in a row with no new checkpoint the run stops with exit code 93."""

    id: str = ""
    """Identifies the run, and owns its checkpoint store. Empty: drawn when the run folder is made. Name the
    id of a run whose folder is gone to go on with it in a new folder."""

    from_checkpoint: FromCheckpointSection = field(default_factory=FromCheckpointSection)
    """Start from another run's checkpoint."""

    def __post_init__(self) -> None:
        is_plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", self.id) is not None
        rule(not self.id or is_plain, "id may have letters, digits, '-' and '_', 64 at most.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSection:
    """Where processes run."""

    nodes: int = 1
    """Nodes; with `yatt run` virtual ones, each with a controller of its own, on this machine."""

    gpus_per_node: int = 1
    """GPUs of a node. Without GPUs these are slots: as many trainer ranks run beside each other."""

    engine_gpus_per_node: int = 0
    """disaggregated: GPUs of a node that only runs engines; 0: as `gpus_per_node`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where it is."""

    threads_per_worker: int = 1
    """Computing threads of each worker process on CPU."""

    scratch_dir: str = "/tmp"
    """Node-local folder for sockets and journals."""

    shm_dir: str = "/dev/shm"
    """Node-local memory filesystem; weights pass from trainer to engines through it."""

    start_timeout_s: float = 300.0
    """How long workers may take to come up before the attempt is given up."""

    phase_timeout_s: float = 3600.0
    """How long one phase may take before its laggards are named and the attempt is given up."""

    node_silence_s: float = 10.0
    """A controller not heard of by the leader for so long is lost; each gives a sign of life a second."""

    def __post_init__(self) -> None:
        rule(self.nodes >= 1, f"nodes is {self.nodes}; write 1 or more.")
        rule(self.gpus_per_node >= 1, f"gpus_per_node is {self.gpus_per_node}; write 1 or more.")
        rule(self.engine_gpus_per_node >= 0, "engine_gpus_per_node must not be negative.")
        rule(
            self.node_silence_s >= 3.0,
            f"node_silence_s is {self.node_silence_s:g}, but three signs of life, one a second, must fit; "
            "write 3 or more.",
        )
        rule(self.threads_per_worker >= 1, "threads_per_worker must be 1 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Whole state of the run, committed by manifest."""

    url: str = ""
    """Folder or any fsspec URL (s3://bucket/prefix). Empty: `checkpoints` in the run folder."""

    save_every: int = 0
    """Iterations between checkpoints; 0 saves only at the end."""

    keep: int = 2
    """Committed checkpoints that are kept."""

    export_final: bool = True
    """Write the trained policy as a Hugging Face folder, `model` in the run folder, at the end."""

    storage_options: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Handed to fsspec: endpoint_url, profile ... Secrets belong in the driver's own files."""

    def __post_init__(self) -> None:
        rule(self.keep >= 1, "keep must be 1 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSection:
    """Timing of GPU leases."""

    renew_s: float = 2.0
    """A holder's worker says so often that it lives."""

    ttl_s: float = 10.0
    """A holder not heard of for this long has lost its lease."""

    stall_s: float = 600.0
    """A holder that is heard of but makes no progress for this long has lost it too."""

    ask_s: float = 5.0
    term_s: float = 10.0
    kill_s: float = 30.0
    prove_s: float = 50.0
    """How long memory may take to come back, measured, before the GPU is quarantined."""

    slack_bytes: int = 512 << 20
    """Memory a sleeping holder may keep beyond its declared residue and still count as released."""

    max_residue_bytes: int = 8 << 30
    """Device memory a worker may keep asleep on each of its GPUs (contexts, graphs, communicators): what it
    keeps after its first sleep is allowed to it from then on, up to this."""

    def __post_init__(self) -> None:
        rule(
            self.ttl_s >= 3 * self.renew_s,
            f"ttl_s is {self.ttl_s:g}, but three renewals of renew_s {self.renew_s:g} must fit; "
            f"write {3 * self.renew_s:g} or more.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSection:
    """The probe after each weight update."""

    probe_prompts: int = 2
    probe_tokens: int = 16
    tolerance: float = 0.0
    """Largest difference of a log-prob between engine and trainer; 0: 1e-3 (float32), 0.1 (bfloat16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSection:
    """Where a run can be watched."""

    wandb_mode: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "yatt"
    wandb_name: str = ""
    samples_per_iteration: int = 4
    """Completions with their verdicts kept for the report."""
