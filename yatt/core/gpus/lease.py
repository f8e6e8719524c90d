"""The lease of one slab of GPUs: the arbiter's rules, as a pure state machine.

There is one `SlabLease` per slab and one arbiter per node, so one process decides, by its own clock.
A role *holds* the slab by a grant. Each grant has a fencing token one higher than the one before.

- A slab is granted only after a memory check: a `MemoryChecked` measured after the last holder released the
  slab or died must find the memory free. While a process of the slab is being killed and not yet reaped, no
  check finds it free, so that a role whose process is dying cannot receive the grant.
- A holder that is no longer wanted gets a release request, then is terminated, then killed. A holder
  without a heartbeat for ``ttl_s`` or without progress for ``stall_s`` is terminated, then killed.
  From its termination on, its token is refused.
- If memory is not released within ``memory_check_s``, the processes of roles that sleep on this slab are
  killed. If that does not help, or a process cannot be killed, the slab is quarantined for the rest
  of the attempt and is not granted again.

A lease does not stop a process that was paused between its check and its work. Workers check the token of
every order (`WorkerLease`); the kill is the effective fence on a node.

Source: fencing tokens as in Chubby's sequencers.
"""

from dataclasses import dataclass, replace
from enum import Enum

from yatt.errors import LeaseLost


class Stage(Enum):
    """Stages of a slab between one holder and the next."""

    FREE = "free"
    HELD = "held"
    RELEASING = "releasing"
    TERMINATED = "terminated"
    KILLED = "killed"
    CHECKING = "checking"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The arbiter's time limits, in seconds of its own clock."""

    ttl_s: float
    stall_s: float
    release_s: float
    term_s: float
    kill_s: float
    memory_check_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLease:
    """State of one slab. `since_s` is when `stage` began."""

    stage: Stage = Stage.FREE
    token: int = 0
    holder: str = ""
    wanted: str = ""
    since_s: float = 0.0
    heard_s: float = 0.0
    progress: int = -1
    progressed_s: float = 0.0
    purged: bool = False
    """Whether the sleeping roles were killed because memory was not released."""

    cause: str = ""


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """The placement wants `role` to hold the slab; '': no role."""

    role: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat of the holder of `token`; `progress` counts the iterations of its main loops."""

    token: int
    progress: int


@dataclass(frozen=True, slots=True)
class Released:
    """The holder of `token` reports that it has released the slab."""

    token: int


@dataclass(frozen=True, slots=True)
class Died:
    """Every process of `role` that was awake on this slab has ended and is reaped."""

    role: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The holder cannot continue as a whole, and is to be terminated."""

    cause: str


@dataclass(frozen=True, slots=True)
class MemoryChecked:
    """Result of a memory check that was made after the stage CHECKING began."""

    clean: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Want | Beat | Released | Died | Broken | MemoryChecked | Tick

# ---- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestRelease:
    """Send the holder a request to release the slab."""

    role: str
    token: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send the role's process groups on this slab the signal that ends a worker."""

    role: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to the role's process groups on this slab."""

    role: str


@dataclass(frozen=True, slots=True)
class Purge:
    """Send SIGKILL to roles other than `spare` that sleep on this slab and keep too much memory."""

    spare: str


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure memory now; a MemoryChecked follows."""


@dataclass(frozen=True, slots=True)
class Give:
    """Grant the slab: `role` may use it under `token`."""

    role: str
    token: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Grant this slab to no role in this attempt; report the cause."""

    cause: str


Action = RequestRelease | Terminate | Kill | Purge | Measure | Give | Quarantine
Result = tuple[SlabLease, tuple[Action, ...]]


def step(lease: SlabLease, event: Event, now_s: float, timing: Timing) -> Result:
    """Handles an event: returns the slab's next state and the actions, in order."""
    match event:
        case Want(role):
            return _pursue(replace(lease, wanted=role), now_s)
        case Beat(token, progress):
            return _beat(lease, token, progress, now_s), ()
        case Released(token):
            held = lease.stage in (Stage.HELD, Stage.RELEASING) and token == lease.token
            return _prove(lease, now_s) if held else (lease, ())
        case Died(role):
            gone = role == lease.holder and lease.stage is not Stage.QUARANTINED
            return _prove(lease, now_s) if gone else (lease, ())
        case Broken(cause):
            return _terminate(lease, cause, now_s) if is_live(lease, lease.token) else (lease, ())
        case MemoryChecked(clean, detail):
            return _after_check(lease, clean=clean, detail=detail, now_s=now_s)
        case Tick():
            return _tick(lease, now_s, timing)


def is_live(lease: SlabLease, token: int) -> bool:
    """Whether `token` is the token of the current grant and the holder is not terminated."""
    return lease.stage in (Stage.HELD, Stage.RELEASING) and token == lease.token


@dataclass(frozen=True, slots=True)
class WorkerLease:
    """The worker's state of a lease: decides which orders it may carry out.

    Attributes:
        newest: the highest token of any order so far.
        held: the token under which the worker is awake; 0 while it sleeps.
    """

    newest: int = 0
    held: int = 0

    def seen(self, token: int) -> "WorkerLease":
        """Returns the state after an order with this token.

        Raises:
            LeaseLost: an earlier order had a higher token.
        """
        if token < self.newest:
            raise LeaseLost(f"token {token} is of an old lease; the newest here is {self.newest}")
        return replace(self, newest=token)

    def awake(self) -> "WorkerLease":
        """Returns the state after a Wake under the newest token."""
        return replace(self, held=self.newest)

    def asleep(self) -> "WorkerLease":
        """Returns the state of a worker that sleeps or could not be woken."""
        return replace(self, held=0)

    def check_awake(self) -> None:
        """Refuses work while the worker is not awake under the newest token.

        Raises:
            LeaseLost: it sleeps, or was woken under an older token.
        """
        if not self.held or self.held != self.newest:
            raise LeaseLost(f"this worker is not awake under token {self.newest}; send Wake first")


def _beat(lease: SlabLease, token: int, progress: int, now_s: float) -> SlabLease:
    if not is_live(lease, token):
        return lease
    moved = progress != lease.progress
    return replace(
        lease,
        heard_s=now_s,
        progress=progress,
        progressed_s=now_s if moved else lease.progressed_s,
    )


def _pursue(lease: SlabLease, now_s: float) -> Result:
    if lease.stage is Stage.HELD and lease.wanted != lease.holder:
        return replace(lease, stage=Stage.RELEASING, since_s=now_s), (
            RequestRelease(lease.holder, lease.token),
        )
    if lease.stage is Stage.FREE and lease.wanted:
        return replace(lease, stage=Stage.CHECKING, since_s=now_s, purged=False), (Measure(),)
    return lease, ()


def _prove(lease: SlabLease, now_s: float) -> Result:
    """Begins the memory check after the last holder has ended or released the slab."""
    freed = replace(lease, stage=Stage.CHECKING, holder="", since_s=now_s, purged=False)
    return freed, (Measure(),)


def _after_check(lease: SlabLease, *, clean: bool, detail: str, now_s: float) -> Result:
    if lease.stage is not Stage.CHECKING:
        return lease, ()
    if not clean:
        return replace(lease, cause=detail), ()
    if not lease.wanted:
        return replace(lease, stage=Stage.FREE, since_s=now_s, cause=""), ()
    token = lease.token + 1
    held = replace(
        lease,
        stage=Stage.HELD,
        token=token,
        holder=lease.wanted,
        since_s=now_s,
        cause="",
        heard_s=now_s,
        progress=-1,
        progressed_s=now_s,
    )
    return held, (Give(held.holder, token),)


def _tick(lease: SlabLease, now_s: float, timing: Timing) -> Result:
    if lease.stage in (Stage.HELD, Stage.RELEASING):
        lost = _lost(lease, now_s, timing)
        overdue = lease.stage is Stage.RELEASING and now_s - lease.since_s >= timing.release_s
        if not lost and not overdue:
            return lease, ()
        cause = lost or f"{lease.holder} did not release within {timing.release_s:g} s"
        return _terminate(lease, cause, now_s)
    waited_s = now_s - lease.since_s
    if lease.stage is Stage.TERMINATED and waited_s >= timing.term_s:
        return replace(lease, stage=Stage.KILLED, since_s=now_s), (Kill(lease.holder),)
    if lease.stage is Stage.KILLED and waited_s >= timing.kill_s:
        return _quarantine(lease, f"{lease.holder} could not be killed within {timing.kill_s:g} s", now_s)
    if lease.stage is Stage.CHECKING:
        return _keep_checking(lease, waited_s, now_s, timing)
    return lease, ()


def _terminate(lease: SlabLease, cause: str, now_s: float) -> Result:
    ended = replace(lease, stage=Stage.TERMINATED, since_s=now_s, cause=cause)
    return ended, (Terminate(lease.holder),)


def _lost(lease: SlabLease, now_s: float, timing: Timing) -> str:
    if now_s - lease.heard_s >= timing.ttl_s:
        return f"{lease.holder} was not heard of for {timing.ttl_s:g} s"
    if now_s - lease.progressed_s >= timing.stall_s:
        return f"{lease.holder} made no progress for {timing.stall_s:g} s"
    return ""


def _keep_checking(lease: SlabLease, waited_s: float, now_s: float, timing: Timing) -> Result:
    if waited_s < timing.memory_check_s:
        return lease, (Measure(),)
    if not lease.purged:
        return replace(lease, purged=True, since_s=now_s), (Purge(lease.wanted),)
    return _quarantine(lease, f"memory did not come back: {lease.cause or 'no measurement'}", now_s)


def _quarantine(lease: SlabLease, cause: str, now_s: float) -> Result:
    shut = replace(lease, stage=Stage.QUARANTINED, holder="", since_s=now_s, cause=cause)
    return shut, (Quarantine(cause),)
