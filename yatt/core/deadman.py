"""The dead-man's switch: a surviving controller requeues the job when the leader is dead.

With ``--no-kill``, nothing ends the allocation if the batch node is lost. So every other controller watches
the leader in two ways: by its connection, and by a counter that the leader increases in the shared folder.
The leader counts as dead only if both are silent: a controller that only lost its network must not requeue
the job. Times are the observer's own.

Then it asks Slurm whether this start still runs, claims the requeue in the shared folder, and requeues. If a
claimant dies, another one takes over after a while, again only while Slurm shows the same start. Slurm has no
conditional requeue, so an answer is valid only for half the takeover time (`is_fresh`): a claimant that was
paused for longer asks and claims again.
"""

from dataclasses import dataclass, replace
from enum import Enum


class ObserverStage(Enum):
    """What the observer is at."""

    WATCHING = "watching"
    ASKING = "asking"
    CLAIMING = "claiming"
    REQUEUEING = "requeueing"
    WAITING = "waiting"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Limits:
    """`silence_s`: both ways silent for so long means dead. `takeover_s`: how long another's claim may
    stay without effect."""

    silence_s: float = 20.0
    takeover_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Observer:
    """One controller's knowledge of the leader. `counter` was last seen to change at `moved_s`."""

    stage: ObserverStage = ObserverStage.WATCHING
    counter: int = -1
    moved_s: float = 0.0
    claim: int = 0
    waits_since_s: float = 0.0


class Job(Enum):
    """What Slurm says about the start this controller belongs to."""

    SAME = "same"
    DIED = "died"
    """Its batch process was killed: Slurm is ending it, and nobody else asks for the next."""

    OVER = "over"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Look:
    """A look around at `now_s`. `counter` is None if the shared folder cannot be read."""

    now_s: float
    connection_silence_s: float
    counter: int | None


@dataclass(frozen=True, slots=True)
class SlurmSaid:
    """Slurm's answer to AskSlurm."""

    job: Job


@dataclass(frozen=True, slots=True)
class ClaimTried:
    """How trying to claim the requeue ended. `is_mine` None: the shared folder did not answer."""

    is_mine: bool | None


@dataclass(frozen=True, slots=True)
class RequeueReturned:
    """The requeue call returned; whether it worked only Slurm's state tells."""


Event = Look | SlurmSaid | ClaimTried | RequeueReturned


class Action(Enum):
    """What the observer wants done; each is answered by an event."""

    NOTHING = "nothing"
    ASK_SLURM = "ask slurm"
    CLAIM = "claim"
    REQUEUE = "requeue"
    END_SELF = "end self"


Result = tuple[Observer, Action]


def is_fresh(told_s: float, now_s: float, limits: Limits) -> bool:
    """Whether Slurm's answer of `told_s` may still be acted on."""
    return now_s - told_s < limits.takeover_s / 2


def step(observer: Observer, event: Event, limits: Limits) -> Result:
    """One event: the next state and what to do. Events of another stage change nothing."""
    match observer.stage, event:
        case ObserverStage.WATCHING, Look():
            return _watch(observer, event, limits)
        case ObserverStage.WAITING, Look():
            return _wait(observer, event, limits)
        case ObserverStage.ASKING, SlurmSaid(job):
            return _told(observer, job)
        case ObserverStage.CLAIMING, ClaimTried(is_mine):
            return _claimed(observer, is_mine)
        case ObserverStage.REQUEUEING, RequeueReturned():
            return replace(observer, stage=ObserverStage.ASKING), Action.ASK_SLURM
        case _:
            return observer, Action.NOTHING


def _watch(observer: Observer, tick: Look, limits: Limits) -> Result:
    if tick.counter is not None and tick.counter != observer.counter:
        observer = replace(observer, counter=tick.counter, moved_s=tick.now_s)
    if tick.connection_silence_s < limits.silence_s:
        return observer, Action.NOTHING
    if tick.counter is None:
        return observer, Action.NOTHING  # blind: neither the leader's death nor its life is known
    if tick.now_s - observer.moved_s < limits.silence_s:
        return observer, Action.NOTHING
    return replace(observer, stage=ObserverStage.ASKING), Action.ASK_SLURM


def _told(observer: Observer, job: Job) -> Result:
    if job is Job.OVER:
        return replace(observer, stage=ObserverStage.ENDED), Action.END_SELF
    if job is Job.UNKNOWN:  # the next look asks again
        return replace(observer, stage=ObserverStage.WATCHING), Action.NOTHING
    # Also who claimed before claims anew: meanwhile another may have, and have asked Slurm just now as well.
    return replace(observer, stage=ObserverStage.CLAIMING, claim=observer.claim + 1), Action.CLAIM


def _claimed(observer: Observer, is_mine: bool | None) -> Result:
    if is_mine is None:
        return replace(observer, stage=ObserverStage.WATCHING, claim=observer.claim - 1), Action.NOTHING
    if is_mine:
        return replace(observer, stage=ObserverStage.REQUEUEING), Action.REQUEUE
    return replace(observer, stage=ObserverStage.WAITING, waits_since_s=-1.0), Action.NOTHING


def _wait(observer: Observer, tick: Look, limits: Limits) -> Result:
    if observer.waits_since_s < 0:
        return replace(observer, waits_since_s=tick.now_s), Action.NOTHING
    if tick.now_s - observer.waits_since_s < limits.takeover_s:
        return observer, Action.NOTHING
    return replace(observer, stage=ObserverStage.ASKING), Action.ASK_SLURM
