"""Messages between controllers, most of them the leader's orders and their answers."""

import msgspec

from yatt.records.load import NodeLoad
from yatt.records.message import (
    Completed,
    Done,
    Message,
    MiniBatchPlan,
    Order,
    Restored,
    Rollout,
    SampleFact,
    SampleRequest,
    StoreOpened,
)
from yatt.records.shards import StateFile
from yatt.records.usage import RankUsage
from yatt.records.weights import (
    DescribeWeights as DescribeWeights,
    OfferWeights as OfferWeights,
    WeightsDescribed as WeightsDescribed,
    WeightsOffered as WeightsOffered,
)


class StartWorkers(Order[Done], frozen=True, kw_only=True):
    """Order to start this node's processes."""


class SwitchSlabs(Order[Done], frozen=True, kw_only=True):
    """Order for the barrier `part` of a phase: prepare or enter (see yatt.core.phases.phases).

    `holders` are this node's: (slab index, role); no role gets a slab that is not listed.
    """

    seq: int
    part: str
    holders: tuple[tuple[int, str], ...]


class GrantSlabs(Order[Done], frozen=True, kw_only=True):
    """Order to a newcomer to grant its slabs. It answers before the engines are awake: a rollout engine waits
    for weights, which it gets when it is admitted. `holders` as in `SwitchSlabs`."""

    holders: tuple[tuple[int, str], ...]


class OpenTrainerStore(Order[StoreOpened], frozen=True, kw_only=True):
    """Order to the node of global rank 0 to open the store of the process group."""


class BuildTrainer(Order[Done], frozen=True, kw_only=True):
    """Order to join the process group and build from the Hugging Face folder."""

    host: str
    port: int


class RestoreTrainer(Order[Restored], frozen=True, kw_only=True):
    """Order to restore from a checkpoint; `states` are all controllers' files, empty for weights only.

    `is_origin`: the checkpoint is in the store of `run.from_checkpoint`. `is_local`: it is a local commit.
    `weights`: name of the first commit of its weights.
    """

    checkpoint: str
    weights: str
    states: tuple[StateFile, ...]
    is_origin: bool = False
    is_local: bool = False
    weights_only: bool = False


class GroupFact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accepted prompt group, as metadata. `scores`: mean of each score over its completions.

    `ages`: per sample, the age of its oldest token in policy versions.
    """

    number: int
    samples: tuple[SampleFact, ...]
    scores: dict[str, float]
    ages: tuple[int, ...]


class Advanced(Message, frozen=True, kw_only=True):
    """Accepted groups of this node, the number of missing ones, and counters for metrics."""

    groups: tuple[GroupFact, ...]
    missing: int
    counters: dict[str, float] = msgspec.field(default_factory=dict)


class Advance(Order[Advanced], frozen=True, kw_only=True):
    """Order to sample and score with the engines of `roles`, until there is no more work.

    `target` is this node's share of the iteration's prompt groups.
    """

    iteration: int
    policy_version: int
    target: int
    roles: tuple[str, ...]


class BreakOffSampling(Order[Done], frozen=True, kw_only=True):
    """Order to end the current Advance or Validate; completions so far are kept."""


class TrainedNode(Message, frozen=True, kw_only=True):
    """Metrics (the same on every rank), the slowest local rank's seconds by part, all ranks' `costs`, and the
    largest of their `usage`."""

    metrics: dict[str, float]
    timing_s: dict[str, float]
    costs: tuple[tuple[int, int, float], ...] = ()
    usage: RankUsage = RankUsage()


class TrainOrder(Order[TrainedNode], frozen=True, kw_only=True):
    """Order for one iteration's update on every node.

    `dp_lead_ranks`: for each dp_rank the global rank that receives its samples. `is_held_out`: only measure
    the loss of held-out completions.
    """

    iteration: int
    facts: tuple[SampleFact, ...]
    plan: tuple[MiniBatchPlan, ...]
    dp_lead_ranks: tuple[int, ...]
    is_held_out: bool = False


class PicturesShown(Message, frozen=True, kw_only=True):
    """`lost`: why a picture cannot be used any more, by the ids of samples that need it."""

    lost: dict[int, str]


class ShowPictures(Order[PicturesShown], frozen=True, kw_only=True):
    """Order to have ranks see the pictures of their samples, of these groups; the rest as in TrainOrder."""

    iteration: int
    numbers: tuple[int, ...]
    plan: tuple[MiniBatchPlan, ...]
    dp_lead_ranks: tuple[int, ...]


class LeaveOut(Order[Done], frozen=True, kw_only=True):
    """Order to drop these accepted prompt groups: why, by their numbers. No update needs them any more."""

    iteration: int
    reasons: dict[int, str]


class SampleTransfer(Order[Done], frozen=True, kw_only=True):
    """Samples to train on: from their shard's controller to another node's, or to a rank before its Train."""

    iteration: int
    rollouts: tuple[Rollout, ...]


class TakeWeights(Order[Done], frozen=True, kw_only=True):
    """Order to make published weights available to this node's engines: what no rank of this node has, it
    fetches from other nodes.

    `probe`, `probe_logprobs` and `rounding` are as in Publish and Published. `sums`: checksums of some
    tensors, by name; `part_sums`: of the slices of each node of an engine that spans several.
    """

    policy_version: int
    probe: tuple[bytes, ...]
    probe_logprobs: tuple[bytes, ...]
    rounding: float
    sums: dict[str, int]
    part_sums: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)


class SyncWeights(Order[Done], frozen=True, kw_only=True):
    """Order to load the newest weights into engines that kept their slab through training."""


class Alive(Message, frozen=True, kw_only=True):
    """Keep-alive message between the leader and every other controller, once per second; to the leader with
    what the node's engines do."""

    load: NodeLoad = NodeLoad()


class PeerLost(Message, frozen=True, kw_only=True):
    """From the leader to every other node: send no more requests to this process of a node."""

    node: int
    life: int
    why: str


class Knock(Order[Done], frozen=True, kw_only=True):
    """From a newcomer to the leader: it asks to take part. The answer only says that it was heard."""

    address: str


class PeerJoined(Order[Done], frozen=True, kw_only=True):
    """From the leader to every other node: this process is the node's controller now."""

    node: int
    life: int
    address: str


class Roster(Order[Done], frozen=True, kw_only=True):
    """From the leader to a node that was admitted: what has changed since the controllers met."""

    lost: tuple[int, ...]
    joined: tuple[PeerJoined, ...]
    judges: dict[str, str] = msgspec.field(default_factory=dict)
    """As in UseJudges."""


class SourceScores(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out completions of one data source: sums over those that have a score, which `failed` have not.

    `reasons`: why they failed, and how many of them for this reason; only the most frequent ones.
    `best`: by the number of completions, the sum over prompts of the expected best score of so many; and over
    how many prompts, because one with fewer scores is left out.
    `majority`: sum over prompts of the score of the most frequent answer, over `num_prompts` with a score;
    `num_voted`: prompts that have an answer.
    """

    total: float = 0.0
    count: int = 0
    failed: int = 0
    reasons: dict[str, int] = {}
    extras: dict[str, float] = {}
    num_prompts: int = 0
    best: dict[int, tuple[float, int]] = {}
    majority: float = 0.0
    num_voted: int = 0


class ValidatedNode(Message, frozen=True, kw_only=True):
    """Scores by data source."""

    sources: dict[str, SourceScores]


class ValidateOrder(Order[ValidatedNode], frozen=True, kw_only=True):
    """Order to sample and score this node's data shard of the held-out prompts."""

    iteration: int


class OpenHeldOut(Order[Advanced], frozen=True, kw_only=True):
    """Order to open this node's data shard of the held-out rows, whose completions are given."""


class PromptsDone(Message, frozen=True, kw_only=True):
    """Number of a node's prompts, and of those that are too long and are not among them."""

    num_prompts: int
    too_long: int


class EvaluatePrompts(Order[PromptsDone], frozen=True, kw_only=True):
    """Order to a trainer node to sample its prompts and score the samples, as far as these roles can."""

    roles: tuple[str, ...]


class WriteSamples(Order[Done], frozen=True, kw_only=True):
    """Order to a trainer node to write its samples to the run folder."""


class EventLines(Message, frozen=True, kw_only=True):
    """Lines of the event log for the leader, each one JSON object."""

    lines: bytes


class Forwarded(Message, frozen=True, kw_only=True):
    """The completion; the number of requests that the node's engines of the role accept, and the number that
    other nodes have there."""

    completed: Completed
    room: int
    version: int
    elsewhere: int


class ForwardBounced(Message, frozen=True, kw_only=True):
    """The request was returned without being the cause: send it again, here only if there is room."""

    why: str
    room: int
    version: int


class Forward(Order[Forwarded | ForwardBounced], frozen=True, kw_only=True):
    """Request to run this in an engine of `role` on the receiver's node, which fills in the token."""

    role: str
    sample: SampleRequest


class EngineRoom(Order[Done], frozen=True, kw_only=True):
    """For trainer nodes: the number of requests that this node's awake engines of `role` accept now.

    `version` rises with every change; a lower one is out of date.
    """

    role: str
    room: int
    version: int


class ForwardAbort(Message, frozen=True, kw_only=True):
    """Order to abort the requests of node `origin` in the receiver's engines of `role`: all, or only
    `request_ids`."""

    role: str
    origin: str
    request_ids: tuple[str, ...] = ()


class CommitNotice(Order[Done], frozen=True, kw_only=True):
    """Order to drop these prompt groups, which were trained on."""

    iteration: int
    numbers: tuple[int, ...]


class Quit(Order[Done], frozen=True, kw_only=True):
    """Order to stop the workers and end, because the attempt is over."""

    reason: str
    exit_code: int


class FailureReport(Order[Done], frozen=True, kw_only=True):
    """Report to the leader of a failure that this node cannot recover from.

    `is_symptom`: a failure on another node may be the cause.
    """

    error: str
    exit_code: int
    is_symptom: bool = False


class StatusAnswer(Message, frozen=True, kw_only=True):
    """JSON of the controller's state."""

    text: bytes


class StatusQuery(Order[StatusAnswer], frozen=True, kw_only=True):
    """Request for the state of a controller."""
