"""Which keys of a run may change when it is resumed.

*Operational* keys do not affect what is trained: limits of time, saves, logs, the number of iterations.
*Layout* keys change only in which order numbers are added, where, and with how much memory; with
`run.deterministic` they may not change, because a resumed run would no longer be bit-equal. All other keys
are *mathematical*: they decide what is trained, or which run it is. A key that is not listed here is
mathematical.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from yatt.config.schema import RunConfig
from yatt.credentials import is_secret_name

Kind = Literal["operational", "layout", "mathematical"]

OPERATIONAL = (
    "run.max_attempts_without_progress",
    "run.accept_changed",
    "data.train_files",  # moved: a checkpoint has a fingerprint of their content
    "data.media_root",  # moved: each row has the digests of its pictures
    "data.media_store",
    "data.val_files",  # moved: `yatt.core.attempts.inputs` compares their content
    "trainer.total_iterations",
    "launch.reward_processes",
    "launch.scratch_dir",
    "launch.shm_dir",
    "launch.start_timeout_s",
    "launch.phase_timeout_s",
    "launch.node_silence_s",
    "launch.bind_workers",
    "rollout.request_timeout_s",
    "rollout.max_retries",
    "rewards.*.timeout_s",
    "rewards.*.trial",
    "rewards.*.batch_wait_s",
    "genrms.*.timeout_s",
    "genrms.*.api.url",
    "genrms.*.api.key_env",
    "genrms.*.api.requests_per_minute",
    "genrms.*.api.max_concurrency",
    "genrms.*.api.timeout_s",
    "genrms.*.api.retries",
    "genrms.*.api.outage_s",
    "environment.timeout_s",
    "environment.trial",
    "placement.send_changes",
    "placement.send_slices",
    "checkpoint.save_every",
    "checkpoint.save_every_minutes",
    "checkpoint.keep",
    "checkpoint.keep_every",
    "checkpoint.keep_best",
    "checkpoint.best_metric",
    "checkpoint.best_mode",
    "checkpoint.export_final",
    "checkpoint.max_bytes_per_s",
    "checkpoint.max_run_bytes_per_s",
    "checkpoint.stall_s",
    "checkpoint.local_dir",
    "checkpoint.storage_options",
    "validation.*",
    "lease.*",
    "sync.*",
    "logging.*",
    "profile.*",
    "media.cache_bytes",
    "media.timeout_s",
    "media.storage_options",
)

_ENGINE = (
    "engine", "tp_size", "max_num_seqs", "kv_cache_bytes", "gpu_memory_utilization", "enforce_eager",
    "expert_parallel", "engine_args",
)  # fmt: skip

LAYOUT = (
    "launch.nodes",
    "launch.gpus_per_node",
    "launch.engine_gpus_per_node",
    "launch.device",
    "launch.threads_per_worker",
    "model.spec",
    "placement.mode",
    "placement.genrm_gpu_sets",
    "placement.split",
    "placement.min_gpu_sets",
    "placement.max_gpu_sets",
    "placement.trainer_nodes",
    "trainer.*_parallel_size",
    "trainer.sequence_parallel",
    "trainer.max_tokens_per_micro_batch",
    "trainer.recompute",
    "trainer.recompute_layers",
    "trainer.recompute_modules",
    "trainer.offload_optimizer",
    "trainer.overlap_grad_reduce",
    "trainer.overlap_param_gather",
    *(f"rollout.{key}" for key in _ENGINE),
    *(f"genrms.*.{key}" for key in _ENGINE),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One key with another value; list items have their index in the key, as `rewards.0.timeout_s`."""

    key: str
    was: Any
    now: Any

    def in_words(self) -> str:
        """A sentence with both values; without them where they may be credentials."""
        if "storage_options" in self.key or is_secret_name(self.key) or self.key == "logging.webhook_url":
            return f"{self.key} differs"
        return f"{self.key}: was {self.was!r}, is {self.now!r}"


def change_kind(key: str) -> Kind:
    """Returns the kind of a key, as in `Change.key`."""
    if matches_key(key, OPERATIONAL):
        return "operational"
    return "layout" if matches_key(key, LAYOUT) else "mathematical"


def matches_key(key: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches the key: ``.*`` at its end stands for a whole section, another ``*`` for a
    part."""
    for pattern in patterns:
        section = pattern.removesuffix(".*")
        inner = re.escape(section).replace(r"\*", "[^.]+")
        if re.fullmatch(inner if section == pattern else rf"{inner}\..+", key):
            return True
    return False


def changed_keys(before: RunConfig, now: RunConfig) -> list[Change]:
    """Returns every key whose value differs, in the order of the run file. `data.weights` differs if a data
    file has another weight, not if the file has another path."""
    listed = _changes(asdict(before), asdict(now), "")
    if _weights(before) != _weights(now):
        return list(listed)
    return [change for change in listed if not matches_key(change.key, ("data.weights", "data.weights.*"))]


def _weights(config: RunConfig) -> list[float]:
    return [config.data.weights.get(file, 1.0) for file in config.data.train_files]


def is_allowed(change: Change, *, deterministic: bool) -> bool:
    """Whether a run may be resumed with this change."""
    if change.key.endswith(".engine") and "scripted" in (change.was, change.now):
        return False  # that engine has no model
    kind = change_kind(change.key)
    return kind == "operational" or (kind == "layout" and not deterministic)


def _changes(before: Any, now: Any, key: str) -> Iterator[Change]:
    if before == now:
        return
    pairs = _pairs(before, now)
    if pairs is None or change_kind(key) != "mathematical":
        yield Change(key, before, now)
        return
    for name, (was, value) in pairs.items():
        yield from _changes(was, value, f"{key}.{name}" if key else name)


def _pairs(before: Any, now: Any) -> dict[str, tuple[Any, Any]] | None:
    """Returns the parts of two sections or lists of sections, by name; None if they have others."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before.keys() == now.keys():
        return {name: (before[name], now[name]) for name in before}
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        is_sections = all(isinstance(item, Mapping) for item in (*before, *now))
        return {str(i): pair for i, pair in enumerate(zip(before, now, strict=True))} if is_sections else None
    return None
