"""Messages between controllers, most of them the leader's orders and their answers."""

import msgspec

from yatt.records.message import (
    Completed,
    Done,
    Message,
    MiniBatchPlan,
    Order,
    Published,
    Restored,
    Rollout,
    Sample,
    SampleFact,
    ShardFile,
    StoreOpened,
)


class StartWorkers(Order[Done], frozen=True, kw_only=True):
    """Start this node's processes."""


class SwitchSlabs(Order[Done], frozen=True, kw_only=True):
    """PREPARE or ENTER of a phase (see yatt.core.phases).

    `holders` are this node's: (slab index, role); a slab that is not named is wanted by nobody.
    """

    seq: int
    part: str
    holders: tuple[tuple[int, str], ...]


class OpenTrainerStore(Order[StoreOpened], frozen=True, kw_only=True):
    """To the node of global rank 0."""


class BuildTrainer(Order[Done], frozen=True, kw_only=True):
    """Join the process group and build from the Hugging Face folder."""

    host: str
    port: int


class StateFile(msgspec.Struct, frozen=True, kw_only=True):
    """A controller's file of a checkpoint (`control.rollouts.carried`); `path` is relative to the store."""

    path: str
    size_bytes: int
    sha256: str


class RestoreTrainer(Order[Restored], frozen=True, kw_only=True):
    """Fill what was built from a checkpoint; `states` are all controllers' files, empty for weights only.

    `is_origin`: the checkpoint is in the store of `run.from_checkpoint`.
    """

    checkpoint: str
    states: tuple[StateFile, ...]
    is_origin: bool = False
    weights_only: bool = False


class GroupFact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accepted prompt group, as metadata. `scores`: mean of each score over its completions.

    `ages`: of each sample, how many policy versions ago its oldest token was sampled.
    """

    number: int
    samples: tuple[SampleFact, ...]
    scores: dict[str, float]
    ages: tuple[int, ...]


class Advanced(Message, frozen=True, kw_only=True):
    """Accepted groups of this node's share, what is still missing, and counters for metrics."""

    groups: tuple[GroupFact, ...]
    missing: int
    counters: dict[str, float] = msgspec.field(default_factory=dict)


class Advance(Order[Advanced], frozen=True, kw_only=True):
    """Sample and score with the engines of `roles`, until nothing moves.

    `target` is this node's share of the iteration's prompt groups.
    """

    iteration: int
    policy_version: int
    target: int
    roles: tuple[str, ...]


class BreakOffSampling(Order[Done], frozen=True, kw_only=True):
    """Abandon the Advance or Validate under way; keep what was sampled."""


class TrainedNode(Message, frozen=True, kw_only=True):
    """Metrics (the same on every rank), the slowest local rank's seconds by part, all ranks' `costs`."""

    metrics: dict[str, float]
    timing_s: dict[str, float]
    costs: tuple[tuple[int, int, float], ...] = ()


class TrainOrder(Order[TrainedNode], frozen=True, kw_only=True):
    """One iteration's update on every node.

    `dp_lead_ranks`: for each dp_rank the global rank that is handed its samples.
    """

    iteration: int
    facts: tuple[SampleFact, ...]
    plan: tuple[MiniBatchPlan, ...]
    dp_lead_ranks: tuple[int, ...]


class SampleTransfer(Order[Done], frozen=True, kw_only=True):
    """Samples to train on: from the controller that owns them to another node's, or to a trainer rank
    ahead of its Train."""

    iteration: int
    rollouts: tuple[Rollout, ...]


class SavedNode(Message, frozen=True, kw_only=True):
    """What was written: shards, and this controller's own state."""

    files: tuple[ShardFile, ...]
    common: bytes
    state: StateFile
    stall_s: float


class SaveOrder(Order[SavedNode], frozen=True, kw_only=True):
    """Write this node's shards."""

    iteration: int
    url: str


class ExportOrder(Order[Done], frozen=True, kw_only=True):
    """Write the policy as a Hugging Face folder, all ranks together."""

    folder: str


class PublishOrder(Order[Published], frozen=True, kw_only=True):
    """Write the weights to this node's memory filesystem."""

    policy_version: int
    probe: tuple[bytes, ...]


class FetchWeights(Order[Done], frozen=True, kw_only=True):
    """Copy what node `source` published to this node's memory filesystem.

    `probe`, `probe_logprobs` and `rounding` are as in the source's PublishOrder and Published.
    """

    policy_version: int
    source: int
    probe: tuple[bytes, ...]
    probe_logprobs: tuple[bytes, ...]
    rounding: float


class PublicationListed(Message, frozen=True, kw_only=True):
    """Names and bytes of the files, the index last."""

    files: tuple[tuple[str, int], ...]


class ListPublication(Order[PublicationListed], frozen=True, kw_only=True):
    """To a trainer node: what files are this policy version?"""

    policy_version: int


class Piece(Message, frozen=True, kw_only=True):
    """Part of a file."""

    data: bytes


class ReadPublication(Order[Piece], frozen=True, kw_only=True):
    """To a trainer node: so many bytes of a published file from `offset` on."""

    policy_version: int
    name: str
    offset: int
    num_bytes: int


class FileDigest(Message, frozen=True, kw_only=True):
    """SHA-256 of a file."""

    sha256: str


class DigestPublication(Order[FileDigest], frozen=True, kw_only=True):
    """To a trainer node: the checksum of a whole published file."""

    policy_version: int
    name: str


class SyncWeights(Order[Done], frozen=True, kw_only=True):
    """Engines that kept their slab through training take the newest weights now."""


class Alive(Message, frozen=True, kw_only=True):
    """A controller's sign of life, between the leader and every other, once a second."""


class PeerLost(Message, frozen=True, kw_only=True):
    """From the leader to a trainer node: ask nothing of this node any more."""

    node: int
    why: str


class SourceScores(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out completions of one data source: sums over those scored, and how many there are and failed."""

    total: float = 0.0
    count: int = 0
    failed: int = 0
    extras: dict[str, float] = {}


class ValidatedNode(Message, frozen=True, kw_only=True):
    """Scores by data source."""

    sources: dict[str, SourceScores]


class ValidateOrder(Order[ValidatedNode], frozen=True, kw_only=True):
    """Sample and score this node's data shard of the held-out prompts."""

    iteration: int


class EventLines(Message, frozen=True, kw_only=True):
    """To the leader: lines of the event log, each one JSON object."""

    lines: bytes


class Forwarded(Message, frozen=True, kw_only=True):
    """The completion; how many requests the node's engines of the role take, and how many others have
    there."""

    completed: Completed
    room: int
    version: int
    elsewhere: int


class ForwardBounced(Message, frozen=True, kw_only=True):
    """The request is not to blame for coming back: ask for it again, here only if there is room."""

    why: str
    room: int
    version: int


class Forward(Order[Forwarded | ForwardBounced], frozen=True, kw_only=True):
    """Let an engine of `role` on the receiver's node do this; its token is filled in there."""

    role: str
    sample: Sample


class EngineRoom(Order[Done], frozen=True, kw_only=True):
    """To trainer nodes: so many requests do this node's awake engines of `role` take now.

    `version` rises with every change; a lower one is out of date.
    """

    role: str
    room: int
    version: int


class ForwardAbort(Message, frozen=True, kw_only=True):
    """Break off what node `origin` has under way in the receiver's engines of `role`, or these requests of
    it."""

    role: str
    origin: str
    request_ids: tuple[str, ...] = ()


class CommitNotice(Order[Done], frozen=True, kw_only=True):
    """These prompt groups were trained on: drop them."""

    iteration: int
    numbers: tuple[int, ...]


class Quit(Order[Done], frozen=True, kw_only=True):
    """The attempt is over: stop the workers and end."""

    reason: str
    exit_code: int


class FailureReport(Order[Done], frozen=True, kw_only=True):
    """To the leader: something here that this node cannot mend.

    `is_symptom`: it may only follow from what happened on another node.
    """

    error: str
    exit_code: int
    is_symptom: bool = False


class StatusAnswer(Message, frozen=True, kw_only=True):
    """JSON of the controller's state."""

    text: bytes


class StatusQuery(Order[StatusAnswer], frozen=True, kw_only=True):
    """Ask a controller what it is doing."""
