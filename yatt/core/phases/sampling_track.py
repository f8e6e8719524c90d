"""The sampling track: which batch is sampled next, and when engines load weights. A pure state machine.

The leader drives two machines. `yatt.core.phases.phases` is the training track: it needs one batch after the
other, and makes one policy version after the other. This one is the sampling track. A *batch* is the prompt
groups that one iteration trains on; it has the iteration's number. Policy version v is the policy after
iteration v.

Two rules join the tracks:

- *Credit*: sampling may be `ahead` batches further than the newest batch that training has asked for. With 0,
  the tracks take turns: a batch is begun when training asks for it.
- *Age*: batch b is trained by policy version b - 1. It is begun only if the engines have a version that is at
  most `max_age` older.

Engines load weights between two batches, never during one (drain). They load the newest version that is
published, before they begin the next batch. No version is published while they load, because a publication
overwrites the weights of the one before.

Training waits for one thing at a time: a batch, the permission to publish, engines that have loaded a version
(only without credit: else they load it later), or quiet engines for a validation.
"""

from dataclasses import dataclass, replace
from enum import Enum


class Awaited(Enum):
    """What the training track waits for."""

    NOTHING = "nothing"
    BATCH = "batch"
    PUBLISHING = "publishing"
    SYNC = "sync"
    QUIET = "quiet"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackRules:
    """Constants of an attempt. Batches count from 1."""

    total_iterations: int
    ahead: int = 0
    max_age: int = 0
    has_engines: bool = True
    """Whether engines sample batches, by weights that they have loaded; else batches are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """State of the sampling track.

    Attributes:
        wanted: the newest batch that training has asked for.
        sampled: the newest batch that is complete.
        sampling: the batch that is sampled now; 0: none.
        version: the policy version that engines have; -1: none.
        published: the newest published policy version; -1: none.
        is_loading: whether engines load `published`.
        is_publishing: whether weights may change until the next version is published.
        is_quiet: whether a validation uses the engines.
    """

    wanted: int = 0
    sampled: int = 0
    sampling: int = 0
    version: int = -1
    published: int = -1
    is_loading: bool = False
    is_publishing: bool = False
    is_quiet: bool = False
    is_stopped: bool = False
    awaited: Awaited = Awaited.NOTHING


# ---- events: of the training track ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrackResumed:
    """This many iterations are trained already."""

    iteration: int


@dataclass(frozen=True, slots=True)
class WantBatch:
    """Training waits for this batch. It asks again if the batch lacks groups, without credit also after the
    batch was scored."""

    batch: int


@dataclass(frozen=True, slots=True)
class WantPublishing:
    """Training waits until weights may change."""


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """This policy version is published; training waits until it may continue."""

    version: int


@dataclass(frozen=True, slots=True)
class WantQuiet:
    """Training waits until engines have the newest version and sample nothing."""


@dataclass(frozen=True, slots=True)
class QuietOver:
    """The validation is over."""


@dataclass(frozen=True, slots=True)
class EndSampling:
    """The run ends early: nothing more is begun."""


# ---- events: of the engines -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampling of a batch has ended; `is_whole`: no groups are missing."""

    batch: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """Engines have loaded this policy version."""

    version: int


Event = (
    TrackResumed
    | WantBatch
    | WantPublishing
    | VersionPublished
    | WantQuiet
    | QuietOver
    | EndSampling
    | Sampled
    | Loaded
)

# ---- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Begin to sample this batch, or continue with it; engines have this policy version."""

    batch: int
    version: int


@dataclass(frozen=True, slots=True)
class LoadVersion:
    """Make the engines load this policy version."""

    version: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Training may continue. `again`: the batch lacks groups; `is_stopped`: in vain, because the run ends."""

    again: bool = False
    is_stopped: bool = False


Action = SampleBatch | LoadVersion | Grant
Result = tuple[Track, tuple[Action, ...]]


def step(track: Track, event: Event, rules: TrackRules) -> Result:
    """Handles an event: returns the next state and the actions, in order. Ignores unexpected events."""
    lacks_groups = isinstance(event, Sampled) and event.batch == track.sampling and not event.is_whole
    after = _after(track, event)
    if lacks_groups and after.awaited is Awaited.BATCH and after.wanted == track.sampling:
        return replace(after, awaited=Awaited.NOTHING), (Grant(again=True),)
    after, granted = _granted(after, rules)
    after, begun = _begun(after, rules)
    return after, (*granted, *begun)


def _after(track: Track, event: Event) -> Track:
    match event:
        case Sampled() if event.batch == track.sampling:
            return replace(track, sampling=0, sampled=event.batch if event.is_whole else track.sampled)
        case Loaded() if track.is_loading and event.version == track.published:
            return replace(track, is_loading=False, version=event.version)
        case Sampled() | Loaded():
            return track
        case EndSampling():
            return replace(track, is_stopped=True)
        case _:
            return _asked(track, event)


def _asked(track: Track, event: Event) -> Track:
    """Returns the state after an event of the training track."""
    match event:
        case TrackResumed(iteration):
            return replace(track, wanted=iteration, sampled=iteration)
        case WantBatch(batch):  # asked again: the batch lacks groups
            sampled = batch - 1 if batch == track.wanted else track.sampled
            return replace(track, wanted=batch, sampled=sampled, awaited=Awaited.BATCH)
        case WantPublishing():
            return replace(track, awaited=Awaited.PUBLISHING)
        case VersionPublished(version):
            return replace(track, published=version, is_publishing=False, awaited=Awaited.SYNC)
        case WantQuiet():
            return replace(track, awaited=Awaited.QUIET)
        case QuietOver():
            return replace(track, is_quiet=False)
        case _:
            return track


def _granted(track: Track, rules: TrackRules) -> Result:
    """Lets training continue if it has what it waits for."""
    is_current, nothing = track.version == track.published, replace(track, awaited=Awaited.NOTHING)
    match track.awaited:
        case Awaited.BATCH if track.sampled >= track.wanted:
            return nothing, (Grant(),)
        case Awaited.PUBLISHING if not track.is_loading:
            return replace(nothing, is_publishing=True), (Grant(),)
        case Awaited.SYNC if is_current or rules.ahead:
            return nothing, (Grant(),)
        case Awaited.BATCH | Awaited.QUIET | Awaited.SYNC if track.is_stopped and not track.is_loading:
            return nothing, (Grant(is_stopped=True),)
        case Awaited.QUIET if is_current and not track.sampling:
            return replace(nothing, is_quiet=True), (Grant(),)
        case _:
            return track, ()


def _begun(track: Track, rules: TrackRules) -> Result:
    """Begins what engines do next, if they do nothing."""
    if track.sampling or track.is_loading or track.is_quiet or track.is_stopped:
        return track, ()
    if track.version < track.published and not track.is_publishing:
        return replace(track, is_loading=True), (LoadVersion(track.published),)
    batch = track.sampled + 1
    has_credit = batch <= min(rules.total_iterations, track.wanted + rules.ahead)
    is_young = track.version >= 0 and batch - 1 - track.version <= rules.max_age
    is_young |= not rules.has_engines
    if has_credit and is_young and track.awaited is not Awaited.QUIET:
        return replace(track, sampling=batch), (SampleBatch(batch, track.version),)
    return track, ()
