"""Who may use one slab of GPUs: the arbiter's rules, as a pure state machine.

One `SlabLease` a slab, one arbiter a node, so there is one authority and no clock but its own. A
role *holds* the slab by a grant with a fencing token, one higher than any grant before. The rules:

- A grant is given only over memory proved free: after the last holder released or died, a `Proof`
  that says clean must come, measured after that. Never on hope. While a process of the slab is being
  killed and is not reaped yet, no proof is clean: else the one that is dying could be granted.
- A holder that is unwanted is asked, then terminated, then killed; one that is not heard of for
  ``ttl_s``, or makes no progress for ``stall_s``, is terminated and killed. From that moment on its
  token is refused.
- Memory that does not come back in ``prove_s`` costs the sleeping roles of this slab their
  processes; if that does not help, or a process cannot be killed, the slab is quarantined for the
  rest of the attempt and nobody gets it.

What this does not do: it does not stop a process that was paused between its check and its act. Workers check
the token of every order (`WorkerLease`), and the kill is the real fence on a node.

Source: fencing tokens as in Chubby's sequencers; ask-terminate-kill-verify as in DESIGN section 6.
"""

from dataclasses import dataclass, replace
from enum import Enum

from yatt.errors import LeaseLost


class Stage(Enum):
    """Where a slab is on its way from one holder to the next."""

    FREE = "free"
    HELD = "held"
    ASKED = "asked"
    TERMINATED = "terminated"
    KILLED = "killed"
    PROVING = "proving"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The arbiter's patience, in seconds of its own clock."""

    ttl_s: float
    stall_s: float
    ask_s: float
    term_s: float
    kill_s: float
    prove_s: float


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
    """The sleeping roles were killed because memory did not come back."""

    cause: str = ""


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """The placement wants `role` to hold the slab; '' wants nobody."""

    role: str


@dataclass(frozen=True, slots=True)
class Beat:
    """The holder of `token` lives; `progress` counts its main loops' turns."""

    token: int
    progress: int


@dataclass(frozen=True, slots=True)
class Released:
    """The holder of `token` says it has let go."""

    token: int


@dataclass(frozen=True, slots=True)
class Died:
    """Every process of `role` on this slab is gone and reaped."""

    role: str


@dataclass(frozen=True, slots=True)
class Proof:
    """Memory was measured after the slab began proving."""

    clean: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Want | Beat | Released | Died | Proof | Tick

# ---- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestRelease:
    """Tell the holder to sleep."""

    role: str
    token: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """The signal that ends a worker, to the role's process groups on this slab."""

    role: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to the role's process groups on this slab."""

    role: str


@dataclass(frozen=True, slots=True)
class Purge:
    """SIGKILL to the roles asleep on this slab, other than `spare`, that keep memory they may not."""

    spare: str


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure memory now and answer with a Proof."""


@dataclass(frozen=True, slots=True)
class Give:
    """The grant: `role` may use the slab under `token`."""

    role: str
    token: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Nobody gets this slab any more; tell people why."""

    cause: str


Action = RequestRelease | Terminate | Kill | Purge | Measure | Give | Quarantine
Result = tuple[SlabLease, tuple[Action, ...]]


def step(lease: SlabLease, event: Event, now_s: float, timing: Timing) -> Result:
    """One event against one slab: its next state, and what to do, in order."""
    match event:
        case Want(role):
            return _pursue(replace(lease, wanted=role), now_s)
        case Beat(token, progress):
            return _beat(lease, token, progress, now_s), ()
        case Released(token):
            held = lease.stage in (Stage.HELD, Stage.ASKED) and token == lease.token
            return _prove(lease, now_s) if held else (lease, ())
        case Died(role):
            gone = role == lease.holder and lease.stage is not Stage.QUARANTINED
            return _prove(lease, now_s) if gone else (lease, ())
        case Proof(clean, detail):
            return _proved(lease, clean=clean, detail=detail, now_s=now_s)
        case Tick():
            return _tick(lease, now_s, timing)


def is_live(lease: SlabLease, token: int) -> bool:
    """Whether acts under `token` still count."""
    return lease.stage in (Stage.HELD, Stage.ASKED) and token == lease.token


@dataclass(frozen=True, slots=True)
class WorkerLease:
    """The worker's side of a lease: which orders it may act on.

    Attributes:
        newest: the highest token that any order carried.
        held: the token under which the worker is awake; 0 while it sleeps.
    """

    newest: int = 0
    held: int = 0

    def seen(self, token: int) -> "WorkerLease":
        """An order with this token has come.

        Raises:
            LeaseLost: a higher token was seen before.
        """
        if token < self.newest:
            raise LeaseLost(f"token {token} is of an old lease; the newest here is {self.newest}")
        return replace(self, newest=token)

    def awake(self) -> "WorkerLease":
        """Wake was ordered under the newest token."""
        return replace(self, held=self.newest)

    def asleep(self) -> "WorkerLease":
        """The worker sleeps, or could not be woken."""
        return replace(self, held=0)

    def check_awake(self) -> None:
        """Refuses work of a worker that is not awake under the newest token.

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
        return replace(lease, stage=Stage.ASKED, since_s=now_s), (RequestRelease(lease.holder, lease.token),)
    if lease.stage is Stage.FREE and lease.wanted:
        return replace(lease, stage=Stage.PROVING, since_s=now_s, purged=False), (Measure(),)
    return lease, ()


def _prove(lease: SlabLease, now_s: float) -> Result:
    """The last holder is gone or has let go: measure before anything else."""
    freed = replace(lease, stage=Stage.PROVING, holder="", since_s=now_s, purged=False)
    return freed, (Measure(),)


def _proved(lease: SlabLease, *, clean: bool, detail: str, now_s: float) -> Result:
    if lease.stage is not Stage.PROVING:
        return lease, ()
    if not clean:
        return replace(lease, cause=detail), ()
    if not lease.wanted:
        return replace(lease, stage=Stage.FREE, since_s=now_s, cause=""), ()
    token = lease.token + 1
    held = replace(
        lease, stage=Stage.HELD, token=token, holder=lease.wanted, since_s=now_s, cause="",
        heard_s=now_s, progress=-1, progressed_s=now_s,
    )  # fmt: skip
    return held, (Give(held.holder, token),)


def _tick(lease: SlabLease, now_s: float, timing: Timing) -> Result:
    if lease.stage in (Stage.HELD, Stage.ASKED):
        lost = _lost(lease, now_s, timing)
        overdue = lease.stage is Stage.ASKED and now_s - lease.since_s >= timing.ask_s
        if not lost and not overdue:
            return lease, ()
        cause = lost or f"{lease.holder} did not release within {timing.ask_s:g} s"
        ended = replace(lease, stage=Stage.TERMINATED, since_s=now_s, cause=cause)
        return ended, (Terminate(lease.holder),)
    waited_s = now_s - lease.since_s
    if lease.stage is Stage.TERMINATED and waited_s >= timing.term_s:
        return replace(lease, stage=Stage.KILLED, since_s=now_s), (Kill(lease.holder),)
    if lease.stage is Stage.KILLED and waited_s >= timing.kill_s:
        return _quarantine(lease, f"{lease.holder} could not be killed within {timing.kill_s:g} s", now_s)
    if lease.stage is Stage.PROVING:
        return _keep_proving(lease, waited_s, now_s, timing)
    return lease, ()


def _lost(lease: SlabLease, now_s: float, timing: Timing) -> str:
    if now_s - lease.heard_s >= timing.ttl_s:
        return f"{lease.holder} was not heard of for {timing.ttl_s:g} s"
    if now_s - lease.progressed_s >= timing.stall_s:
        return f"{lease.holder} made no progress for {timing.stall_s:g} s"
    return ""


def _keep_proving(lease: SlabLease, waited_s: float, now_s: float, timing: Timing) -> Result:
    if waited_s < timing.prove_s:
        return lease, (Measure(),)
    if not lease.purged:
        return replace(lease, purged=True, since_s=now_s), (Purge(lease.wanted),)
    return _quarantine(lease, f"memory did not come back: {lease.cause or 'no measurement'}", now_s)


def _quarantine(lease: SlabLease, cause: str, now_s: float) -> Result:
    shut = replace(lease, stage=Stage.QUARANTINED, holder="", since_s=now_s, cause=cause)
    return shut, (Quarantine(cause),)
