"""The dead-man's switch: a surviving controller requeues the job when the leader is dead.

With ``--no-kill``, nothing ends the allocation if the batch node is lost. So every other controller watches
the leader in two ways: by its connection, and by a counter that the leader increases in the shared folder.
The leader counts as dead only if both are silent: a controller that only lost its network must not requeue
the job. Times are read from the observer's own clock.

Then the observer asks Slurm whether this start still runs, claims the requeue in the shared folder, and
requeues. If a claimant dies, another one takes over after `takeover_s`, again only while Slurm shows the same
start. Slurm has no conditional requeue, so an answer is valid only for half the takeover time (`is_fresh`): a
claimant that was paused for longer asks and claims again.
"""

from dataclasses import dataclass, replace
from enum import Enum


class ObserverStage(Enum):
    """Stages of the observer."""

    WATCHING = "watching"
    ASKING = "asking"
    CLAIMING = "claiming"
    REQUEUEING = "requeueing"
    WAITING = "waiting"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Limits:
    """`silence_s`: silence on both ways after which the leader counts as dead. `takeover_s`: time after which
    another controller's claim without effect is taken over."""

    silence_s: float = 20.0
    takeover_s: float = 20.0


NUM_WITNESSES = 3
"""Number of controllers that look for a dead leader first."""

LATER_S, SPREAD_S = 20.0, 20.0
"""The others look this much later, if the witnesses are gone too; and not all at once."""

GOLDEN = 0.618033988749895
"""Multiples of it, modulo 1, are spread evenly, however many there are (Weyl, equidistribution)."""


def limits_of(index: int) -> Limits:
    """Returns the limits of a node's controller. Of 512 that miss the leader, a few ask Slurm; the others are
    ended by the next start before it is their turn."""
    if index <= NUM_WITNESSES:
        return Limits()
    return Limits(silence_s=Limits().silence_s + LATER_S + SPREAD_S * (index * GOLDEN % 1.0))


@dataclass(frozen=True, slots=True)
class Observer:
    """State of one controller's observer. The leader's `counter` was last seen to change at `moved_s`."""

    stage: ObserverStage = ObserverStage.WATCHING
    counter: int = -1
    moved_s: float = 0.0
    claim: int = 0
    waits_since_s: float = 0.0


class Job(Enum):
    """State of this controller's start in Slurm."""

    SAME = "same"
    DIED = "died"
    """Its batch process was killed: Slurm is ending the start, and no other process requests the next one."""

    OVER = "over"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Look:
    """An observation at `now_s`. `counter` is None if the shared folder cannot be read, or was not."""

    now_s: float
    connection_silence_s: float
    counter: int | None


@dataclass(frozen=True, slots=True)
class SlurmSaid:
    """Slurm's answer to AskSlurm."""

    job: Job


@dataclass(frozen=True, slots=True)
class ClaimTried:
    """Result of the attempt to claim the requeue. `is_mine` is None if the shared folder did not answer."""

    is_mine: bool | None


@dataclass(frozen=True, slots=True)
class RequeueReturned:
    """The requeue call returned. Only the job's state in Slurm shows whether it worked."""


Event = Look | SlurmSaid | ClaimTried | RequeueReturned


class Action(Enum):
    """Actions that the observer requests; an event follows each."""

    NOTHING = "nothing"
    ASK_SLURM = "ask slurm"
    CLAIM = "claim"
    REQUEUE = "requeue"
    END_SELF = "end self"


Result = tuple[Observer, Action]


def is_fresh(told_s: float, now_s: float, limits: Limits) -> bool:
    """Whether Slurm's answer of time `told_s` is still valid."""
    return now_s - told_s < limits.takeover_s / 2


def step(observer: Observer, event: Event, limits: Limits) -> Result:
    """Handles an event: returns the next state and an action. Events of another stage change nothing."""
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
        return observer, Action.NOTHING  # without the shared folder, the leader's state is unknown
    if tick.now_s - observer.moved_s < limits.silence_s:
        return observer, Action.NOTHING
    return replace(observer, stage=ObserverStage.ASKING), Action.ASK_SLURM


def _told(observer: Observer, job: Job) -> Result:
    if job is Job.OVER:
        return replace(observer, stage=ObserverStage.ENDED), Action.END_SELF
    if job is Job.UNKNOWN:  # the next look asks again
        return replace(observer, stage=ObserverStage.WATCHING), Action.NOTHING
    # Claim again even after an earlier claim: another controller may have claimed and asked Slurm meanwhile.
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
