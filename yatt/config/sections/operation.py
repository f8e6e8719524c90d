"""The run file's sections about operation: where and how a run runs.

The other sections and the complete config are in `yatt.config.schema`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Literal

from yatt.config.sections.given import RunKind
from yatt.config.sections.ranges import (
    COUNT,
    COUNT_OR_NONE,
    FILE,
    LAYOUT,
    LINE,
    MOST_BYTES,
    OPERATIONAL,
    SECONDS,
    SEED,
    SIZE_BYTES,
    Free,
    at_least,
    range_between,
)
from yatt.credentials import CURE, has_secret, secret_option
from yatt.records.inputs import is_input

MOST_MINUTES = 60 * 24 * 365

WANDB = "wandb"
TRACKERS = ("tensorboard", "mlflow")
"""Trackers of the package beside wandb, which has keys of its own."""


def rule(holds: bool, says: str) -> None:
    """Refuses a section; `says` is the mistake and what to write.

    Raises:
        ValueError: the rule does not hold.
    """
    if not holds:
        raise ValueError(says)


def no_credentials(url: str, options: Mapping[str, object], key: str = "url") -> None:
    """Refuses credentials in a store's URL or options; the message does not contain them.

    Args:
        key: name of the URL's key.

    Raises:
        ValueError: there are some.
    """
    rule(not has_secret(url), f"{key} contains a password or a signature; remove it. {CURE}")
    name = secret_option(options)
    rule(not name, f"storage_options.{name} is or contains a credential; remove it. {CURE}")


def tracker_name(tracker: str) -> str:
    """Returns the name of an entry of `logging.trackers`: of a user's file, its name without .py."""
    return tracker if tracker in TRACKERS else PurePath(tracker).stem


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCheckpointSection:
    """A checkpoint of another run from which this run starts. It is only read."""

    url: Annotated[str, LINE] = ""
    """The other run's checkpoint store: a folder or any fsspec URL. Empty: start from `model.path`."""

    storage_options: dict[str, Free] = field(default_factory=dict)
    """Options passed to fsspec."""

    iteration: Annotated[int, COUNT_OR_NONE] = 0
    """Iteration of the checkpoint; 0 is the newest complete one."""

    take: Literal["weights", "state"] = "weights"
    """weights: new optimizer, iteration 0. state: also optimizer, schedule, data position, iteration."""

    def __post_init__(self) -> None:
        no_credentials(self.url, self.storage_options)
        rule(
            bool(self.url) or not self.iteration, "iteration is set, but url is empty; write the store's url."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run itself."""

    dir: Annotated[str, FILE]
    """The run folder, on a filesystem that all nodes see. Relative paths start in the working folder."""

    kind: RunKind = "rl"
    """rl: reinforcement learning. Three train on completions that rows have, without engines: sft, supervised
    fine-tuning; dpo, direct preference optimization; reward_model, a scalar reward model of pairs
    (Bradley-Terry), for `genrms[].kind: scalar`. evaluation: what `yatt eval` makes, which trains nothing."""

    share: Literal["private", "group"] = "private"
    """Readers of the run folder: only you, or also your group. Keys and sockets are always private."""

    seed: Annotated[int, SEED] = 0
    """Seed of all randomness, which is drawn from (seed, iteration, prompt group, rollout)."""

    deterministic: bool = False
    """Make a killed and resumed run end bit-equal to an undisturbed one; sampling gets slower. If an engine
    or reward process ends and a prompt group would be dropped, the attempt ends instead. A reward call that
    exceeds its `timeout_s` is repeated with two and then four times the limit."""

    max_attempts_without_progress: Annotated[int, COUNT, OPERATIONAL] = 3
    """Number of attempts in a row without a new checkpoint after which the run stops with exit code 93."""

    id: Annotated[str, LINE] = ""
    """Identifies the run and the owner of its checkpoint store. Empty: generated when the run folder is made.
    To continue a run whose folder is lost in a new folder, write its id."""

    from_checkpoint: FromCheckpointSection = field(default_factory=FromCheckpointSection)
    """Start from another run's checkpoint."""

    accept_changed: Annotated[tuple[Annotated[str, LINE], ...], OPERATIONAL] = ()
    """Names of inputs that may be others than before when the run is resumed, from then on (`[]` takes it
    back), although the run would be refused: `tokenizer`, `chat_template`, `model_config`, `weights`,
    `critic.model_config`, `data.val_files`; with `deterministic` also those that may change otherwise:
    `rewards[NAME]`, `genrms[NAME].path`, `genrms[NAME].model`, `environment`, `algorithm.path`,
    `model.family`, `critic.weights`."""

    def __post_init__(self) -> None:
        is_plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", self.id) is not None
        rule(not self.id or is_plain, "id may have letters, digits, '-' and '_', at most 64.")
        for name in self.accept_changed:
            rule(is_input(name), f"accept_changed: no input is called {name!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSection:
    """Placement of processes, and time limits."""

    nodes: Annotated[int, range_between(1, 65536), LAYOUT] = 1
    """Number of nodes; with `yatt run`, virtual nodes on this machine, each with its own controller."""

    gpus_per_node: Annotated[int, range_between(1, 1024), LAYOUT] = 1
    """GPUs per node. Without GPUs these are slots: the number of trainer ranks per node."""

    engine_gpus_per_node: Annotated[int, range_between(0, 1024), LAYOUT] = 0
    """disaggregated: GPUs of a node that only runs engines; 0: the same as `gpus_per_node`."""

    device: Annotated[Literal["auto", "cpu", "cuda"], LAYOUT] = "auto"
    """auto uses CUDA if it is available."""

    threads_per_worker: Annotated[int, range_between(1, 65536), LAYOUT] = 1
    """Compute threads of each worker process on CPU."""

    bind_workers: Annotated[bool, OPERATIONAL] = True
    """Bind engines and trainer ranks to the job's CPUs on their GPUs' NUMA nodes."""

    nurseries: bool = True
    """Fork workers from a process per node and kind that has imported their libraries. A node so imports them
    once, and a worker that was killed is back sooner. false: start each worker by itself."""

    reward_processes: Annotated[int, COUNT_OR_NONE, OPERATIONAL] = 0
    """Processes per trainer node that run reward functions; 0: one per core, at most 8. A synchronous
    function occupies its process while it runs."""

    scratch_dir: Annotated[str, FILE, OPERATIONAL] = "/tmp"
    """Node-local folder for sockets, and on nodes with GPUs for compiled code, in `yatt-cache-UID`."""

    shm_dir: Annotated[str, FILE, OPERATIONAL] = "/dev/shm"
    """Node-local memory filesystem, through which weights are transferred from trainer to engines."""

    start_timeout_s: Annotated[float, SECONDS, OPERATIONAL] = 300.0
    """Time limit for workers to start before the attempt ends. Also the limit for retrying a failed fork, and
    the time for which an engine that initializes counts as making progress (then `lease.stall_s` applies)."""

    phase_timeout_s: Annotated[float, SECONDS, OPERATIONAL] = 3600.0
    """Time limit without progress at a node in a phase (no token, tensor, micro-batch or reward call) before
    the attempt ends and the node is named. Also the longest wait while a checkpoint store, data or model
    files, or (between attempts) the run folder fail. If a single checkpoint file cannot be read, the wait is
    two minutes, or half of this if shorter."""

    node_silence_s: Annotated[float, SECONDS, OPERATIONAL] = 10.0
    """Time without a heartbeat after which the leader takes a controller for lost; one is sent every
    second."""

    def __post_init__(self) -> None:
        rule(
            self.node_silence_s >= 3.0,
            f"node_silence_s is {self.node_silence_s:g}, but must allow for three heartbeats, one per "
            "second; write 3 or more.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Checkpoints: the complete state of the run, committed by a manifest."""

    url: Annotated[str, LINE] = ""
    """The checkpoint store: a folder or any fsspec URL (s3://bucket/prefix). Empty: `checkpoints`
    in the run folder."""

    save_every: Annotated[int, COUNT_OR_NONE, OPERATIONAL] = 0
    """Iterations between checkpoints; 0: none by this key. The end of a run is always saved."""

    save_every_minutes: Annotated[float, at_least(0, most=MOST_MINUTES), OPERATIONAL] = 0.0
    """Minutes between checkpoints, for iterations of unequal length; 0: none by this key. The first iteration
    that ends later is saved. If `save_every` is set too, a save is due by whichever comes first."""

    keep: Annotated[int, COUNT, OPERATIONAL] = 2
    """Number of newest committed checkpoints that are kept."""

    keep_every: Annotated[int, COUNT_OR_NONE, OPERATIONAL] = 0
    """Keep the first checkpoint at or after every multiple of this number of iterations for ever; 0: none."""

    keep_best: Annotated[int, COUNT_OR_NONE, OPERATIONAL] = 0
    """Number of checkpoints with the best value of `best_metric` that are kept; 0: none. A checkpoint whose
    iteration has no finite value of this metric is not one of them: it stays only by `keep` or
    `keep_every`."""

    best_metric: Annotated[str, LINE, OPERATIONAL] = ""
    """keep_best: key of the metric in metrics.jsonl, for example critic/rewards/mean."""

    best_mode: Annotated[Literal["max", "min"], OPERATIONAL] = "max"
    """keep_best: max if a larger value is better, min if a smaller one is."""

    export_final: Annotated[bool, OPERATIONAL] = True
    """Write the trained policy as a Hugging Face folder, `model` in the run folder, at the end."""

    max_bytes_per_s: Annotated[int, SIZE_BYTES, OPERATIONAL] = 0
    """Limit of each trainer node's uploads, in bytes per second; 0: none."""

    max_run_bytes_per_s: Annotated[int, SIZE_BYTES, OPERATIONAL] = 0
    """Limit of the uploads of all trainer nodes together, which share it evenly; 0: none. With both limits, a
    node has the smaller one."""

    stall_s: Annotated[float, SECONDS, OPERATIONAL] = 60.0
    """S3: seconds without progress after which a request is given up and repeated. A whole request may take
    any time."""

    local_dir: Annotated[str, LINE, OPERATIONAL] = ""
    """Folder on a local disk of each trainer node, in which the node keeps its files of the newest two
    checkpoints, so that a restart reads them instead of the store, and its last save if there is no time for
    the store. $NAME is a variable of the node's processes ($TMPDIR). Empty: none. The folder must exist, with
    room for the files of two saves, and 1 GiB."""

    storage_options: Annotated[dict[str, Free], OPERATIONAL] = field(default_factory=dict)
    """Options passed to fsspec: endpoint_url, profile ... Credentials are refused here: they come from the
    environment or the driver's own files."""

    def __post_init__(self) -> None:
        no_credentials(self.url, self.storage_options)
        rule(
            not self.local_dir or self.local_dir[0] in "/$",
            f"local_dir: '{self.local_dir}' is relative; begin it with / or $NAME.",
        )
        rule(
            bool(self.best_metric) or not self.keep_best,
            "keep_best is set, but best_metric is empty; write a key of metrics.jsonl.",
        )
        rule(
            bool(self.keep_best) or not self.best_metric,
            "best_metric is set, but keep_best is 0; write how many checkpoints to keep by it.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSection:
    """Timing of GPU leases."""

    renew_s: Annotated[float, SECONDS] = 2.0
    """Interval at which a holder's workers renew the lease."""

    ttl_s: Annotated[float, SECONDS] = 10.0
    """Time without a renewal after which a holder loses its lease. Of several engines on a GPU set, each
    loses its own."""

    stall_s: Annotated[float, SECONDS] = 600.0
    """Time without progress after which a holder loses its lease even if it renews."""

    release_s: Annotated[float, SECONDS] = 5.0
    """Time limit for a holder to sleep after the request. On GPUs it has one more second for each GiB that
    it has on one of them at most."""

    term_s: Annotated[float, SECONDS] = 10.0
    """Time limit for its processes to end after SIGTERM."""

    kill_s: Annotated[float, SECONDS] = 30.0
    """Time limit for its processes to end after SIGKILL; then the GPU set is quarantined."""

    memory_check_s: Annotated[float, SECONDS] = 50.0
    """Time limit for measured memory to become free, before the GPU is quarantined."""

    slack_bytes: Annotated[int, SIZE_BYTES] = 512 << 20
    """Memory that a sleeping holder may keep in addition to its sleeping memory and still count as
    released."""

    max_sleeping_bytes: Annotated[int, SIZE_BYTES] = 8 << 30
    """Largest device memory of a sleeping worker per GPU (contexts, graphs, communicators). What it keeps
    after the first sleep that followed work of its role is its allowance from then on."""

    def __post_init__(self) -> None:
        rule(
            self.ttl_s >= 3 * self.renew_s,
            f"ttl_s is {self.ttl_s:g}, but must allow for three renewals of renew_s {self.renew_s:g}; "
            f"write {3 * self.renew_s:g} or more.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSection:
    """The check after each weight update."""

    probe_prompts: Annotated[int, COUNT_OR_NONE] = 2
    """Number of prompts that compare the log-probs of engine and trainer after each weight update; 0: compare
    only bits. Where prompts have pictures, there is one more, with a picture of noise."""

    probe_tokens: Annotated[int, COUNT] = 16
    """Number of tokens of each of these prompts."""

    tolerance: Annotated[float, at_least(0)] = 0.0
    """Largest mean difference of log-probs between engine and trainer; 0: the measured rounding error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSection:
    """Metrics, events and notifications."""

    wandb_mode: Literal["disabled", "offline", "online"] = "disabled"
    """Send metrics to Weights & Biases."""

    wandb_project: Annotated[str, LINE] = "yatt"
    """Name of the project at Weights & Biases."""

    wandb_name: Annotated[str, LINE] = ""
    """Name of the run at Weights & Biases; empty: the run folder's name."""

    trackers: tuple[Annotated[str, FILE], ...] = ()
    """Send metrics also to: tensorboard (files in the run folder), mlflow (at MLFLOW_TRACKING_URI, else files
    in the run folder), or a Python file of your own that defines make_tracker. metrics.jsonl is always
    written."""

    send_rows: Literal["committed", "at_once"] = "committed"
    """When a tracker gets an iteration's row. committed: once a checkpoint in the store covers it, so that no
    tracker keeps numbers of iterations that were lost and trained again; curves come in pieces of
    checkpoint.save_every or save_every_minutes, and of a run that is given up the last piece does not come.
    If neither is set, as with at_once: at the end of the iteration; of one that is trained again a tracker
    keeps the first numbers."""

    send_samples: bool = False
    """Send the samples of samples.jsonl too (prompts, completions, scores), as a table, to all trackers."""

    webhook_url: Annotated[str, LINE] = ""
    """URL that gets a JSON message by HTTP POST (text, run, id, state) when the run has finished, has given
    up, or restarts repeatedly without progress. Readers of the run folder can see it in config.yaml."""

    rollouts: Literal["none", "sample", "all"] = "sample"
    """Samples that are recorded for people (`yatt show`, `yatt report`). sample: `samples_per_iteration` of
    each iteration, in samples.jsonl. all: also every sample of every iteration, with the GenRMs' prompts and
    answers, in compressed files of the folder `rollouts` in the run folder."""

    rollouts_keep: Annotated[int, COUNT] = 20
    """rollouts: all: number of newest iterations whose files are kept."""

    samples_per_iteration: Annotated[int, COUNT_OR_NONE] = 4
    """Number of samples per iteration in samples.jsonl, for the report."""

    samples_file_bytes: Annotated[int, range_between(4096, MOST_BYTES)] = 64 << 20
    """Size at which samples.jsonl loses its older half."""

    print_sample_every: Annotated[int, COUNT_OR_NONE] = 0
    """`yatt run` and `yatt resume` print a sample, with its reward, of each iteration that this divides;
    0: none. It is one of samples.jsonl."""

    events_file_bytes: Annotated[int, range_between(4096, MOST_BYTES)] = 64 << 20
    """Size at which a file of events is continued in the next one: events.jsonl, events.000001.jsonl."""

    events_files: Annotated[int, at_least(2)] = 16
    """Number of event files to keep. The oldest are deleted; the report does not show their events."""

    alarm_iterations: Annotated[int, COUNT_OR_NONE] = 5
    """Number of iterations in a row without a learning signal (all rewards or all groups equal, no gradient,
    every completion truncated, loss out of bounds) that raises an alarm; 0 turns alarms off."""

    def __post_init__(self) -> None:
        records_any = self.samples_per_iteration > 0 and self.rollouts != "none"
        rule(
            not self.print_sample_every or records_any,
            "print_sample_every: no sample is recorded; write rollouts: sample, and samples_per_iteration.",
        )
        for tracker in self.trackers:
            rule(tracker != WANDB, "trackers: wandb has its own key; write wandb_mode: online or offline.")
            rule(
                tracker in TRACKERS or tracker.endswith(".py"),
                f"trackers: '{tracker}' is unknown; write tensorboard, mlflow, or the path of a .py file.",
            )
        names = [WANDB, *map(tracker_name, self.trackers)]
        twice = next((name for name in names if names.count(name) > 1), "")
        rule(not twice, f"trackers: two are named {twice}; remove or rename one.")
