"""Events of GPU sets (slabs): leases, splits, moves, and what engines did in a batch."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from yatt.records.events.event import Amount, Count, Event, Share

Role = Annotated[str, msgspec.Meta(pattern="^(rollout$|genrm:)")]
"""Name of a role that has engines."""


class LeaseGranted(Event, tag="lease.grant", frozen=True, kw_only=True):
    """The holder has the slab, with this fencing token."""

    slab: str
    holder: str
    token: Count = 0


class LeaseReleased(Event, tag="lease.release", frozen=True, kw_only=True):
    """The holder sleeps; memory is checked."""

    slab: str
    holder: str = ""
    token: Count = 0


class LeaseExpired(Event, tag="lease.expire", frozen=True, kw_only=True):
    """The holder was ended: it showed no life, or did not release in time."""

    slab: str
    holder: str = ""
    token: Count = 0
    cause: str


class LeaseRefused(Event, tag="lease.refused", frozen=True, kw_only=True):
    """A worker could not release."""

    slab: str
    holder: str
    token: Count
    error: str


class MemoryNotFree(Event, tag="lease.not_free", frozen=True, kw_only=True):
    """Memory of a slab's GPUs is used by somebody else."""

    slab: str
    cause: str


class SlabQuarantined(Event, tag="lease.quarantine", frozen=True, kw_only=True):
    """The slab is not used any more."""

    slab: str
    cause: str


class EngineExpired(Event, tag="engine.expire", frozen=True, kw_only=True):
    """One engine of several on a slab was ended."""

    worker: str
    cause: str


class EngineUnfit(Event, tag="engine.unfit", frozen=True, kw_only=True):
    """An engine cannot be built on a slab, which stays with its first role."""

    slab: str
    holder: str
    first: str = ""
    error: str


Engines = Annotated[int, msgspec.Meta(ge=0, le=64)]
"""Number of engines of a slab."""


class RoleMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """One engine role in one batch.

    Attributes:
        step_s, sequence_s: seconds of a decoding step, and of each sequence in it; None: not measured.
        room: sequences that an engine runs at once.
        engines: of one slab.
        slabs: at the end of the batch.
        idle: share of the engine seconds that it held in which no sequence ran.
        busy_s, held_s: engine seconds with a running sequence; of all that it held.
        span: slabs of one engine, if it is on several nodes.
    """

    step_s: Amount | None = None
    sequence_s: Amount | None = None
    room: Count
    engines: Engines
    slabs: Count
    idle: Share | None = None
    busy_s: Amount | None = None
    held_s: Amount | None = None
    span: Count = 1

    @property
    def slabs_per_engine(self) -> float:
        """Part of a slab that one engine fills, or number of slabs that it has."""
        return max(1, self.span) / max(1, self.engines)


MOST_ROLES = 32
"""Largest number of roles in one event."""

MOST_LENGTHS = 10_001

Roles = Annotated[Mapping[Role, RoleMeasured], msgspec.Meta(max_length=MOST_ROLES)]
Split = Annotated[Mapping[Role, Count], msgspec.Meta(max_length=MOST_ROLES)]


class BatchMeasured(Event, tag="batch.load", frozen=True, kw_only=True):
    """What a batch was like; `yatt simulate` reads it.

    Attributes:
        seconds: of sampling and judging.
        num_samples: completions of the batch.
        lengths: quantiles of tokens of the policy per completion, from 0% to 100% at even distances.
        verdicts: mean tokens of verdicts per completion, by role of the GenRM.
        questions: mean number of their answers per completion; older files have none.
        switch_s: seconds of a switch; 0 if none was measured.
        train_s: seconds of training, saving, publication and loading of the iteration before; 0 if unknown.
        kept: share of the groups that were not dropped.
    """

    iteration: Count
    seconds: Amount
    num_samples: Count
    lengths: Annotated[Sequence[Amount], msgspec.Meta(min_length=2, max_length=MOST_LENGTHS)]
    verdicts: Mapping[Role, Amount]
    roles: Roles
    switch_s: Amount
    train_s: Amount
    kept: Share
    questions: Mapping[Role, Amount] = {}

    def __post_init__(self) -> None:
        """Refuses what was never measured."""
        if not self.kept or any(low > high for low, high in itertools.pairwise(self.lengths)):
            raise ValueError("kept is 0, or lengths fall")

    @property
    def busy_share(self) -> float | None:
        """Busy engine seconds of all roles by the engine seconds that they held, where all engines of a slab
        count as much as one that fills it; None if a role has none of them."""
        busy = held = 0.0
        for role in self.roles.values():
            if role.busy_s is None or role.held_s is None:
                return None
            busy += role.busy_s * role.slabs_per_engine
            held += role.held_s * role.slabs_per_engine
        return min(1.0, busy / held) if held else None

    @property
    def bound_s(self) -> float | None:
        """Seconds that the batch would have taken with no idle engine."""
        share = self.busy_share
        return None if share is None else share * self.seconds


class SplitChosen(Event, tag="split.choose", frozen=True, kw_only=True):
    """The split of the next batch: slabs by role, and predicted seconds of a batch, before and after."""

    before: Split
    after: Split
    predicted_s: Amount | None = None
    chosen_s: Amount | None = None
    num_samples: Count = 0
    tokens: Mapping[Role, Amount] | None = None
    switch_s: Amount | None = None
    took_s: Amount | None = None

    @property
    def is_change(self) -> bool:
        """Whether another split was chosen."""
        return dict(self.before) != dict(self.after)

    @property
    def gain_s(self) -> float | None:
        """Predicted seconds that the change saves in each batch."""
        if self.predicted_s is None or self.chosen_s is None:
            return None
        return self.predicted_s - self.chosen_s


class SplitFailed(Event, tag="split.failed", frozen=True, kw_only=True):
    """The policy of the split raised an error; slabs stay where they are."""

    error: str


class SlabOrdered(Event, tag="slab.move", frozen=True, kw_only=True):
    """A slab is to change its role.

    Attributes:
        running: requests that its engines had near the end of a batch.
        backlog_s, after_s: seconds of the new role's backlog before the move, and with this slab.
        switch_s: expected seconds of the move.
    """

    slab: str
    before: str
    after: str
    reason: str
    running: Count | None = None
    backlog_s: Amount | None = None
    after_s: Amount | None = None
    switch_s: Amount | None = None
    is_built: bool = True

    @property
    def gain_s(self) -> float | None:
        """Seconds by which the backlog was expected to become shorter, without those of the move."""
        if self.backlog_s is None or self.after_s is None or self.switch_s is None:
            return None
        return self.backlog_s - self.after_s - self.switch_s


class SlabArrived(Event, tag="slab.moved", frozen=True, kw_only=True):
    """The answer to the order: whether the slab has the role now."""

    slab: str
    after: str
    has_moved: bool
    seconds: Amount | None = None
    workers_s: Amount | None = None
