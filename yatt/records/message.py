"""Messages between a controller and its workers, and between controllers.

Arrays are sent as raw bytes: token ids little-endian int32, log-probs little-endian float32. The base classes
and the envelope are in `yatt.records.order`.
"""

from typing import ClassVar

import msgspec

from yatt.records.order import (
    Done as Done,
    Failed as Failed,
    Frame as Frame,
    Message as Message,
    Order as Order,
    answer_type as answer_type,
    as_answer as as_answer,
    unless_failed as unless_failed,
)
from yatt.records.packing import (
    pack_floats as pack_floats,
    pack_ids as pack_ids,
    unpack_floats as unpack_floats,
    unpack_ids as unpack_ids,
)

# ---- any worker ---------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First message of a worker: its heavy imports are done and it accepts orders."""

    worker: str
    pid: int


class Renew(Message, frozen=True, kw_only=True):
    """A holder's heartbeat: `turns` and `work` of its main loop (`yatt.adapters.worker_link`); `waits_for` is
    the error of a store that it waits for."""

    token: int
    turns: int
    work: int
    waits_for: str = ""


class Wake(Order[Done], frozen=True, kw_only=True):
    """Order to use the GPUs: load the model the first time, restore it to them later."""

    under_lease: ClassVar[bool] = True


class Sleep(Order[Done], frozen=True, kw_only=True):
    """Order to free the GPUs, keeping what is needed to wake."""

    under_lease: ClassVar[bool] = True


class Stop(Order[Done], frozen=True, kw_only=True):
    """Order to release everything and exit 0."""


# ---- engines ------------------------------------------------------------------------------------


class Sample(Message, frozen=True, kw_only=True):
    """Request for one completion of one prompt. `seed` alone decides it, given weights and parameters."""

    under_lease: ClassVar[bool] = True
    request_id: str
    prompt_ids: bytes
    seed: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    group: str = ""
    """Requests of one group share a prompt, so one engine should serve them."""

    suspicion: int = 0
    """Number of engines that died with this request in them (`yatt.core.dispatch`)."""


class Abort(Order[Done], frozen=True, kw_only=True):
    """Order to abort these requests; their tokens so far are returned in Completed with reason 'abort'."""

    under_lease: ClassVar[bool] = True
    request_ids: tuple[str, ...]


LOST = "lost"


class Completed(Message, frozen=True, kw_only=True):
    """The tokens that the engine sampled.

    `finish_reason`: stop, length, abort; error (the request is refused, `error` has the reason); lost (the
    engine failed, the request is to be sent again).
    """

    request_id: str
    token_ids: bytes
    logprobs: bytes
    finish_reason: str
    policy_version: int
    error: str = ""


class WeightsLoaded(Message, frozen=True, kw_only=True):
    """The engine's log-probs: one float32 row per probe sequence, for each token but the first.

    `differing`: published tensors (the first few) whose bits differ in the engine, among the `num_compared`
    whose bits can be read there.
    """

    policy_version: int
    probe_logprobs: tuple[bytes, ...]
    differing: tuple[str, ...] = ()
    num_compared: int = 0


class LoadWeights(Order[WeightsLoaded], frozen=True, kw_only=True):
    """Order to load the weights published in `folder`, compare them, and return `probe`'s log-probs."""

    under_lease: ClassVar[bool] = True

    policy_version: int
    folder: str
    probe: tuple[bytes, ...] = ()


class StoreOpened(Message, frozen=True, kw_only=True):
    """The address at which the other ranks join."""

    host: str
    port: int


class OpenStore(Order[StoreOpened], frozen=True, kw_only=True):
    """Order to global rank 0 to host the TCPStore on a free port of `host`."""

    host: str


class Join(Order[Done], frozen=True, kw_only=True):
    """Order to join the process group."""

    host: str
    port: int
    global_rank: int
    world_size: int


class Build(Order[Done], frozen=True, kw_only=True):
    """Order to build model and optimizer from the Hugging Face folder."""

    under_lease: ClassVar[bool] = True


class Restored(Message, frozen=True, kw_only=True):
    """Result of Restore. `fault` is the reason why the checkpoint cannot be restored; empty if it was."""

    fault: str = ""


class Restore(Order[Restored], frozen=True, kw_only=True):
    """Order to restore model, optimizer and schedule, or weights only, from the checkpoint of this manifest.

    `is_origin`: the manifest is in the store of `run.from_checkpoint`.
    """

    under_lease: ClassVar[bool] = True

    checkpoint: str
    is_origin: bool = False
    weights_only: bool = False


class Rollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sample to train on. `policy_versions` are spans (version, first token, end token)."""

    sample_id: int
    prompt_ids: bytes
    completion_ids: bytes
    sampler_logprobs: bytes
    policy_versions: tuple[tuple[int, int, int], ...]
    finish_reason: str


class SampleFact(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Metadata of one sample, which every rank receives for all samples; a few bytes."""

    sample_id: int
    prompt_group: int
    reward: float
    num_prompt_tokens: int
    num_completion_tokens: int
    is_masked: bool = False
    """Whether only its reward is used, in its group's baseline, and its tokens are not trained on."""

    is_cut: bool = False
    """Whether it was cut by a limit of tokens."""


class MiniBatchPlan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One optimizer step: micro-batches per dp_rank, each a list of sample ids.

    Every dp_rank has the same number of micro-batches; an empty one is run fully masked.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]


class Trained(Message, frozen=True, kw_only=True):
    """Metrics of the whole batch (the same on every rank) and this rank's seconds by part.

    `costs`: (tokens, sum of squared lengths, seconds) of micro-batches that could be timed separately.
    """

    metrics: dict[str, float]
    timing_s: dict[str, float]
    costs: tuple[tuple[int, int, float], ...] = ()


class Train(Order[Trained], frozen=True, kw_only=True):
    """Order for one iteration's update. Only the first rank of each dp_rank's model-parallel group gets
    `rollouts`: those that no SampleTransfer has brought."""

    under_lease: ClassVar[bool] = True

    iteration: int
    facts: tuple[SampleFact, ...]
    plan: tuple[MiniBatchPlan, ...]
    rollouts: tuple[Rollout, ...] = ()


class Published(Message, frozen=True, kw_only=True):
    """The trainer's own log-probs of the probe, as in WeightsLoaded.

    `rounding`: their mean change when every layer's output is rounded once more.
    """

    size_bytes: int
    probe_logprobs: tuple[bytes, ...]
    rounding: float = 0.0


class Publish(Order[Published], frozen=True, kw_only=True):
    """Order to write the weights under their Hugging Face names to `folder`, once per node."""

    under_lease: ClassVar[bool] = True

    policy_version: int
    folder: str
    probe: tuple[bytes, ...] = ()


class TensorPiece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor in a shard file: a box of the whole tensor `key`. Its name in the file is its index.

    `begin` and `size_bytes` are its place in the file; `sha256` is the digest of these bytes.
    """

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    begin: int
    size_bytes: int
    sha256: str


class ShardFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint; `path` is relative to the checkpoint store."""

    path: str
    size_bytes: int
    sha256: str
    tensors: tuple[TensorPiece, ...] = ()


class ShardsSaved(Message, frozen=True, kw_only=True):
    """The files that this rank wrote. `common` is JSON of values that all ranks share (rank 0 fills it)."""

    files: tuple[ShardFile, ...]
    common: bytes = b"{}"
    stall_s: float = 0.0


class SaveShards(Order[ShardsSaved], frozen=True, kw_only=True):
    """Order to write this rank's shards under `url`, a prefix that only this attempt uses."""

    under_lease: ClassVar[bool] = True

    iteration: int
    url: str


class ExportHF(Order[Done], frozen=True, kw_only=True):
    """Order to write the policy as a Hugging Face folder."""

    under_lease: ClassVar[bool] = True

    folder: str


# ---- reward worker ------------------------------------------------------------------------------


class RewardsLoaded(Message, frozen=True, kw_only=True):
    """From a reward process, before its Hello: its asynchronous functions."""

    asynchronous: tuple[str, ...]


class RewardsStuck(Message, frozen=True, kw_only=True):
    """From a reward process: the number of asynchronous calls that continue after their cancellation. All of
    them are answered as failed. `limit_s` is the limit of the newest."""

    calls: int
    limit_s: float


class RowRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Place of a data row: number of the file; offset and length of a line, or number of a parquet row."""

    file: int
    at: int
    size: int


class Scored(Message, frozen=True, kw_only=True):
    """The function's score, its other numbers, and how often it called its GenRM."""

    score: float
    extra: dict[str, float] = msgspec.field(default_factory=dict)
    asked: int = 0


class Score(Order[Scored], frozen=True, kw_only=True):
    """Order to call one reward function, or parse one verdict, on one completion.

    The reward process reads the data row itself, so that its values arrive unchanged. For a GenRM with a
    template `completion` is the GenRM's text. The function's limit is `limit_factor` times its `timeout_s`.
    """

    reward: str
    prompt: str
    completion: str
    row: RowRef
    is_held_out: bool = False
    limit_factor: int = 1
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class Answered(Message, frozen=True, kw_only=True):
    """The GenRM's text."""

    text: str
    finish_reason: str


class Ask(Order[Answered], frozen=True, kw_only=True):
    """Request of a reward function's GenRM client: complete `text` with this GenRM."""

    genrm: str
    text: str
    seed: int
    max_tokens: int
    temperature: float
