"""Events of checkpoints, of their store, and of published weights."""

from collections.abc import Sequence

from yatt.records.events.event import Count, Event, FrequentEvent, Seconds


class CheckpointBegan(Event, tag="ckpt.begin", frozen=True, kw_only=True):
    """Host copies of an iteration are taken; their upload begins."""

    iteration: Count
    size_bytes: Count


class CheckpointCommitted(Event, tag="ckpt.commit", frozen=True, kw_only=True):
    """The manifest exists."""

    iteration: Count
    size_bytes: Count
    seconds: Seconds = 0.0


class CheckpointFailed(Event, tag="ckpt.fail", frozen=True, kw_only=True):
    """The save failed; training goes on."""

    iteration: Count
    error: str


class CheckpointPostponed(Event, tag="ckpt.postpone", frozen=True, kw_only=True):
    """Another save is in flight."""

    iteration: Count
    in_flight: Count


class CheckpointGivenUp(Event, tag="ckpt.given_up", frozen=True, kw_only=True):
    """There was no time for the upload."""

    iteration: Count


class CheckpointKeptLocally(Event, tag="ckpt.kept", frozen=True, kw_only=True):
    """The last save is on the nodes' disks only."""

    iteration: Count
    size_bytes: Count
    seconds: Seconds = 0.0


class StoreTooSlow(Event, tag="ckpt.backpressure", frozen=True, kw_only=True):
    """Host copies had to be copied aside, since the upload of the last ones goes on."""

    iteration: Count
    size_bytes: Count
    seconds: Seconds


class LocalFilesLacking(Event, tag="ckpt.local", frozen=True, kw_only=True):
    """A node has no local files of a save."""

    iteration: Count
    error: str


class UploadLost(Event, tag="ckpt.lost", frozen=True, kw_only=True):
    """The uploader died; the save is lost."""

    iteration: Count
    error: str


class CheckpointSkipped(Event, tag="ckpt.skip", frozen=True, kw_only=True):
    """A checkpoint cannot be used; an older one is tried."""

    reason: str


class CommitRefused(Event, tag="ckpt.refuse", frozen=True, kw_only=True):
    """A commit of a stale attempt is not used."""

    name: str


class OriginTaken(Event, tag="ckpt.origin", frozen=True, kw_only=True):
    """The run begins from another run's checkpoint."""

    name: str
    run_id: str
    take: str


class RetentionFailed(Event, tag="ckpt.keep", frozen=True, kw_only=True):
    """Retention could not remove one."""

    reason: str


class StoreAwaited(Event, tag="store.wait", frozen=True, kw_only=True):
    """Somebody waits for the checkpoint store; without `error`: not any more."""

    who: str
    error: str


class WeightsPublished(FrequentEvent, tag="weights.publish", frozen=True, kw_only=True):
    """Host copies have the weights of this version."""

    policy_version: Count
    size_bytes: Count


class WeightsFetched(FrequentEvent, tag="weights.fetch", frozen=True, kw_only=True):
    """A node has fetched what it lacked, from these sources."""

    policy_version: Count
    ranks: Sequence[Count]
    size_bytes: Count
    received_bytes: Count
    unknown_bytes: Count
    sources: Sequence[int]
    seconds: Seconds


class WeightsNotFetched(Event, tag="weights.fetch.fail", frozen=True, kw_only=True):
    """A source failed; another one is tried."""

    rank: Count
    source: int
    error: str


class WeightsChecked(FrequentEvent, tag="weights.check", frozen=True, kw_only=True):
    """An engine's weights and log-probs were compared with the trainer's; None: not finite."""

    worker: str
    policy_version: Count
    difference: float | None
    allowed: float | None
    num_compared: Count
