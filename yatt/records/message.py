"""Messages between a controller and its workers, and between controllers.

Arrays are sent as raw bytes: token ids little-endian int32, log-probs little-endian float32. The base classes
and the envelope are in `yatt.records.order`.
"""

import array
import sys
from typing import ClassVar

import msgspec

from yatt.records.episode import (
    Likeliest,
    MediaRef as MediaRef,
    PlacedMedia as PlacedMedia,
    Rollout as Rollout,
    SampleFact as SampleFact,
    Turn as Turn,
)
from yatt.records.load import StepSums
from yatt.records.media import (
    MediaFault as MediaFault,
    MediaItem as MediaItem,
    MediaPrepared as MediaPrepared,
    PreparedItem as PreparedItem,
    PrepareMedia as PrepareMedia,
)
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
from yatt.records.scores import (
    Answered as Answered,
    Ask as Ask,
    GroupJudged as GroupJudged,
    JudgeGroup as JudgeGroup,
    RewardsLoaded as RewardsLoaded,
    RewardsStuck as RewardsStuck,
    RowRef as RowRef,
    Score as Score,
    Scored as Scored,
    ScoredMany as ScoredMany,
    ScoreMany as ScoreMany,
    Step as Step,
    Stepped as Stepped,
)
from yatt.records.shards import (
    Detach as Detach,
    Detached as Detached,
    PlannedPiece as PlannedPiece,
    SavePlan as SavePlan,
    ShardFile as ShardFile,
    SnapshotTaken as SnapshotTaken,
    TakeSnapshot as TakeSnapshot,
    TensorPiece as TensorPiece,
    Upload as Upload,
    Uploaded as Uploaded,
)
from yatt.records.usage import RankUsage as RankUsage
from yatt.records.weights import (
    PlannedWeight as PlannedWeight,
    WeightBox as WeightBox,
    WeightPlan as WeightPlan,
)

assert sys.byteorder == "little", "arrays travel as little-endian bytes"


def pack_ids(ids: list[int]) -> bytes:
    """Returns token ids as little-endian int32."""
    return array.array("i", ids).tobytes()


def unpack_ids(raw: bytes) -> list[int]:
    """Inverse of `pack_ids`."""
    return array.array("i", raw).tolist()


def pack_floats(values: list[float]) -> bytes:
    """Returns log-probs as little-endian float32."""
    return array.array("f", values).tobytes()


def unpack_floats(raw: bytes) -> list[float]:
    """Inverse of `pack_floats`."""
    return array.array("f", raw).tolist()


# ---- any worker ---------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First message of a worker: its heavy imports are done and it accepts orders."""

    worker: str
    pid: int


class Renew(Message, frozen=True, kw_only=True):
    """A holder's heartbeat: `turns` and `work` of its main loop (`yatt.adapters.net.worker_link`);
    `waits_for` is the error of a store that it waits for; `steps`: an engine's, since its process began."""

    token: int
    turns: int
    work: int
    waits_for: str = ""
    steps: StepSums = StepSums()


class Wake(Order[Done], frozen=True, kw_only=True):
    """Order to use the GPUs: load the model the first time, restore it to them later."""

    under_lease: ClassVar[bool] = True


class Sleep(Order[Done], frozen=True, kw_only=True):
    """Order to free the GPUs, keeping what is needed to wake."""

    under_lease: ClassVar[bool] = True


class Stop(Order[Done], frozen=True, kw_only=True):
    """Order to release everything and exit 0."""


# ---- engines ------------------------------------------------------------------------------------

MOST_WATCHED = 64
"""Most tokens whose log-probs one request may ask for."""


class SampleRequest(Message, frozen=True, kw_only=True):
    """Request for one completion of one prompt. `seed` alone decides it, given weights and parameters.

    `structure`: what the engine may write, {"choice": [...]} or {"json": schema} as JSON; empty: anything.
    `media`: pictures of the prompt, whose placeholder tokens `prompt_ids` has already. `group`: requests of
    one group share a prompt, so one engine should serve them. `scored_from`: above 0, the answer has the
    log-probs of the prompt's tokens from there on (temperature 1), and no tokens. `watched`: ids of at most
    `MOST_WATCHED` tokens; the answer has their log-probs wherever it samples a token. `stop_ids`: tokens that
    end it, as the texts of `stop` do, which cannot name a control token.
    """

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
    media: tuple[PlacedMedia, ...] = ()
    structure: str = ""
    group: str = ""
    scored_from: int = 0
    watched: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    suspicion: int = 0
    """Number of engines that died with this request in them (`yatt.core.requests.dispatch`)."""


class Abort(Order[Done], frozen=True, kw_only=True):
    """Order to abort these requests; their tokens so far are returned in Completed with reason 'abort'."""

    under_lease: ClassVar[bool] = True
    request_ids: tuple[str, ...]


LOST = "lost"
MOVED = "moved"
MEDIA_FAULT = "media_fault"


class Completed(Message, frozen=True, kw_only=True):
    """The tokens that the engine sampled.

    `finish_reason`: stop, length, abort; error (refused, see `error`); lost (the engine failed: it is to be
    sent again). Only controllers write moved (the engine sleeps: the request goes on elsewhere) and
    media_fault (see `error`). `score`: of a scalar reward model. `likeliest`: of a teacher, by scored token.

    `logprobs` are of the distribution that a token was sampled from: after temperature, top-k, top-p and
    structure; at temperature 0, of the model's own, within the structure. `watched`: those of the request's
    watched tokens in the same distributions, float32 [sampled tokens, watched ids] in the order asked; -inf
    where such a token could not be sampled. Unless the request was aborted, none is missing or no number.
    """

    request_id: str
    token_ids: bytes
    logprobs: bytes
    finish_reason: str
    policy_version: int
    error: str = ""
    score: float = 0.0
    likeliest: Likeliest | None = None
    watched: bytes = b""


class WeightsLoaded(Message, frozen=True, kw_only=True):
    """The engine's log-probs: one float32 row per probe sequence, for each token but the first.

    `differing`: published tensors (the first few) whose bits differ in the engine, among the `num_compared`
    of which a checksum is known, of the `num_readable` whose bits can be read there.
    `decoded_difference`: mean difference of the log-probs of tokens that it sampled from its own scores of
    them, of the worst of a few completions; 0 where none were sampled.
    """

    policy_version: int
    probe_logprobs: tuple[bytes, ...]
    differing: tuple[str, ...] = ()
    num_compared: int = 0
    num_readable: int = 0
    decoded_difference: float = 0.0


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
    """Order to global rank 0 to host the key-value service on a free port of `host`."""

    host: str


class Join(Order[Done], frozen=True, kw_only=True):
    """Order to join the process group."""

    host: str
    port: int
    global_rank: int
    world_size: int


class Built(Message, frozen=True, kw_only=True):
    """Bytes of host memory that the rank keeps while it sleeps."""

    host_bytes: int


class Build(Order[Built], frozen=True, kw_only=True):
    """Order to build model and optimizer from the Hugging Face folder, and the host copy at `stem`, whose
    stamps have this attempt."""

    under_lease: ClassVar[bool] = True

    stem: str
    attempt: int


class Restored(Message, frozen=True, kw_only=True):
    """Result of Restore. `fault` is the reason why the checkpoint cannot be restored; empty if it was.
    `local_bytes` were read from the node's local tier instead of the store."""

    fault: str = ""
    local_bytes: int = 0


class Restore(Order[Restored], frozen=True, kw_only=True):
    """Order to restore model, optimizer and schedule, or weights only, from the checkpoint of this manifest.

    `is_origin`: the manifest is in the store of `run.from_checkpoint`. `is_local`: it is a local commit, in
    the run folder.
    """

    under_lease: ClassVar[bool] = True

    checkpoint: str
    is_origin: bool = False
    is_local: bool = False
    weights_only: bool = False


class PicturesSeen(Message, frozen=True, kw_only=True):
    """`missing`: numbers of the order's pictures that are not prepared on this node any more."""

    missing: tuple[int, ...] = ()


class PreparedPicture(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A picture by its file's digest, and the name of its prepared file."""

    sha256: str
    digest: str


class SeePictures(Order[PicturesSeen], frozen=True, kw_only=True):
    """Order to compute the features of pictures that are prepared in `folder`, for one iteration's update;
    those of another iteration are forgotten. Only the first rank of each dp_rank's model-parallel group gets
    it, before Train."""

    under_lease: ClassVar[bool] = True

    iteration: int
    folder: str
    pictures: tuple[PreparedPicture, ...]


class MiniBatchPlan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One optimizer step: micro-batches per dp_rank, each a list of sample ids.

    Every dp_rank has the same number of micro-batches; an empty one is run fully masked.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]


class Trained(Message, frozen=True, kw_only=True):
    """Metrics of the whole batch (the same on every rank), this rank's seconds by part, and what it used.

    `costs`: (tokens, sum of squared lengths, seconds) of micro-batches that could be timed separately.
    `advantages`: packed float32, the mean over its tokens of each sample, in the order of the facts.
    """

    metrics: dict[str, float]
    timing_s: dict[str, float]
    costs: tuple[tuple[int, int, float], ...] = ()
    usage: RankUsage = RankUsage()
    advantages: bytes = b""


class Train(Order[Trained], frozen=True, kw_only=True):
    """Order for one iteration's update; `is_held_out`: only to measure the loss. The first rank of each
    dp_rank's model-parallel group gets `rollouts`: those that no SampleTransfer has brought."""

    under_lease: ClassVar[bool] = True
    iteration: int
    facts: tuple[SampleFact, ...]
    plan: tuple[MiniBatchPlan, ...]
    rollouts: tuple[Rollout, ...] = ()
    is_held_out: bool = False


class Published(Message, frozen=True, kw_only=True):
    """The host copy has the weights; the trainer's own log-probs of the probe, as in WeightsLoaded.

    `size_bytes`, `sums`: of the boxes that this rank answers for; one rank of those with the same boxes does.
    `sums`: of some tensors, the boxes' part of the checksum (`yatt.weights.checksum.box_sum`). `part_sums`:
    of the slices of each node of an engine over several. `rounding`: the log-probs' mean change when every
    layer's output is rounded once more.
    """

    size_bytes: int
    probe_logprobs: tuple[bytes, ...]
    sums: dict[str, int] = msgspec.field(default_factory=dict)
    part_sums: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    rounding: float = 0.0


class Publish(Order[Published], frozen=True, kw_only=True):
    """Order to bring the weights in host copies up to date, of a node by the leader, and of its ranks."""

    under_lease: ClassVar[bool] = True
    policy_version: int
    probe: tuple[bytes, ...] = ()


class ExportHF(Order[Done], frozen=True, kw_only=True):
    """Order to all ranks, by their nodes, to write the policy as a Hugging Face folder together."""

    under_lease = passes_to_ranks = True
    folder: str
