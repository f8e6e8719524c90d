"""The run file's sections about operation: where and how a run runs, not what it learns.

The other sections, and the whole, are in `yatt.config.schema`.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from yatt.config.ranges import (
    COUNT,
    COUNT_OR_NONE,
    FILE,
    LINE,
    MOST_BYTES,
    SECONDS,
    SEED,
    SIZE_BYTES,
    Free,
    at_least,
    between,
)


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

    url: Annotated[str, LINE] = ""
    """The other run's checkpoint store: a folder or any fsspec URL. Empty: start from `model.path`."""

    storage_options: dict[str, Free] = field(default_factory=dict)
    """Handed to fsspec."""

    iteration: Annotated[int, COUNT_OR_NONE] = 0
    """Which checkpoint; 0 is the newest whole one."""

    take: Literal["weights", "state"] = "weights"
    """weights: fresh optimizer, iteration 0. state: optimizer, schedule, data position and count go on."""

    def __post_init__(self) -> None:
        rule(bool(self.url) or not self.iteration, "iteration is set, but url is empty; name the store.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run itself."""

    dir: Annotated[str, FILE]
    """The run folder, on a filesystem every node sees. Relative paths start where the command runs."""

    share: Literal["private", "group"] = "private"
    """Who can read the run folder: only you, or your group too. Keys and sockets are always private."""

    seed: Annotated[int, SEED] = 0
    """Everything random is drawn from (seed, iteration, prompt group, rollout)."""

    deterministic: bool = False
    """Make a killed and resumed run end bit-equal to an undisturbed one; sampling gets slower. Where ends of
    engines or reward processes would cost a prompt group, the attempt ends instead. A reward call that
    meets its `timeout_s` is asked twice more, with two and four times that."""

    max_attempts_without_progress: Annotated[int, COUNT] = 3
    """After so many attempts in a row with no new checkpoint the run stops with exit code 93."""

    id: Annotated[str, LINE] = ""
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

    nodes: Annotated[int, between(1, 65536)] = 1
    """Nodes; with `yatt run` virtual ones, each with a controller of its own, on this machine."""

    gpus_per_node: Annotated[int, between(1, 1024)] = 1
    """GPUs of a node. Without GPUs these are slots: as many trainer ranks run beside each other."""

    engine_gpus_per_node: Annotated[int, between(0, 1024)] = 0
    """disaggregated: GPUs of a node that only runs engines; 0: as `gpus_per_node`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where it is."""

    threads_per_worker: Annotated[int, between(1, 65536)] = 1
    """Computing threads of each worker process on CPU."""

    bind_workers: bool = True
    """Engines and trainer ranks run on the CPUs of their GPUs' NUMA nodes, out of those the job has."""

    reward_processes: Annotated[int, COUNT_OR_NONE] = 0
    """Processes of a trainer node that run reward functions; 0: one a core, 8 at most. A synchronous
    function has its process to itself while it runs."""

    scratch_dir: Annotated[str, FILE] = "/tmp"
    """Node-local folder for sockets."""

    shm_dir: Annotated[str, FILE] = "/dev/shm"
    """Node-local memory filesystem; weights pass from trainer to engines through it."""

    start_timeout_s: Annotated[float, SECONDS] = 300.0
    """How long workers may take to come up before the attempt is given up; a fork that fails is tried again
    for as long, and an engine that builds itself is believed to get on for as long (then `lease.stall_s`)."""

    phase_timeout_s: Annotated[float, SECONDS] = 3600.0
    """How long nothing may get on at a node in a phase before it is named and the attempt is given up: no
    token, tensor, micro-batch or reward call. And how long a checkpoint store, data or model files, or
    (between attempts) the run folder that fail are waited for. One file of a checkpoint that alone cannot be
    read is waited for two minutes at most, or half of this."""

    node_silence_s: Annotated[float, SECONDS] = 10.0
    """A controller not heard of by the leader for so long is lost; each gives a sign of life a second."""

    def __post_init__(self) -> None:
        rule(
            self.node_silence_s >= 3.0,
            f"node_silence_s is {self.node_silence_s:g}, but three signs of life, one a second, must fit; "
            "write 3 or more.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Whole state of the run, committed by manifest."""

    url: Annotated[str, LINE] = ""
    """Folder or any fsspec URL (s3://bucket/prefix). Empty: `checkpoints` in the run folder."""

    save_every: Annotated[int, COUNT_OR_NONE] = 0
    """Iterations between checkpoints; 0 saves only at the end."""

    keep: Annotated[int, COUNT] = 2
    """Committed checkpoints that are kept."""

    export_final: bool = True
    """Write the trained policy as a Hugging Face folder, `model` in the run folder, at the end."""

    storage_options: dict[str, Free] = field(default_factory=dict)
    """Handed to fsspec: endpoint_url, profile ... Secrets belong in the driver's own files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSection:
    """Timing of GPU leases."""

    renew_s: Annotated[float, SECONDS] = 2.0
    """A holder's worker says so often that it lives."""

    ttl_s: Annotated[float, SECONDS] = 10.0
    """A holder not heard of for this long has lost its lease."""

    stall_s: Annotated[float, SECONDS] = 600.0
    """A holder that is heard of but makes no progress for this long has lost it too."""

    ask_s: Annotated[float, SECONDS] = 5.0
    """How long a holder may take to sleep after it was asked."""

    term_s: Annotated[float, SECONDS] = 10.0
    """How long it may take to end after SIGTERM."""

    kill_s: Annotated[float, SECONDS] = 30.0
    """How long it may take to be gone after SIGKILL; then the slab is quarantined."""

    prove_s: Annotated[float, SECONDS] = 50.0
    """How long memory may take to come back, measured, before the GPU is quarantined."""

    slack_bytes: Annotated[int, SIZE_BYTES] = 512 << 20
    """Memory a sleeping holder may keep beyond its declared sleeping memory and still count as released."""

    max_sleeping_bytes: Annotated[int, SIZE_BYTES] = 8 << 30
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

    probe_prompts: Annotated[int, COUNT_OR_NONE] = 2
    """Prompts of the probe that compares engine and trainer after each weight transfer; 0 compares bits
    only."""

    probe_tokens: Annotated[int, COUNT] = 16
    """Tokens of each of these prompts."""

    tolerance: Annotated[float, at_least(0)] = 0.0
    """Mean difference of log-probs between engine and trainer that is allowed; 0: as rounding is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSection:
    """Where a run can be watched."""

    wandb_mode: Literal["disabled", "offline", "online"] = "disabled"
    """Whether metrics are sent to Weights & Biases."""

    wandb_project: Annotated[str, LINE] = "yatt"
    """Its project."""

    wandb_name: Annotated[str, LINE] = ""
    """Name of the run there; empty: the run folder's."""

    webhook_url: Annotated[str, LINE] = ""
    """Gets a JSON message by HTTP POST (text, run, id, state) when the run is finished, has given up, or is
    started again and again in vain. It stands in the run folder's config.yaml, for whoever may read that."""

    samples_per_iteration: Annotated[int, COUNT_OR_NONE] = 4
    """Completions with their verdicts kept for the report."""

    events_file_bytes: Annotated[int, between(4096, MOST_BYTES)] = 64 << 20
    """A file of events that has so many bytes is followed by the next: events.jsonl, events.000001.jsonl."""

    events_files: Annotated[int, at_least(2)] = 16
    """Files of events that are kept. The oldest are deleted; the report does not show what was in them."""

    alarm_iterations: Annotated[int, COUNT_OR_NONE] = 5
    """After so many iterations in a row with a sign that nothing is learned (all rewards or all groups equal,
    no gradient, every completion cut, the loss out of bounds) an alarm says so; 0 turns alarms off."""
