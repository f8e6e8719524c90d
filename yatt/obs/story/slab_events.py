"""Reads events about slabs: the split, moves, engines that could not be built, and the load of each batch.

The log is text from outside: what is missing, of another type, not finite or out of range is None or left
out, and nothing raises an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yatt.obs.story.batch_loads import is_amount, is_count, is_engine_role

MOST_ROLES = 32
"""Number of roles of one event that are read, at most."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChoice:
    """The split that was chosen for the next batch.

    Attributes:
        before, after: slabs by role.
        predicted_s, chosen_s: predicted seconds of a batch with each of them; None if not readable.
    """

    before: Mapping[str, int]
    after: Mapping[str, int]
    predicted_s: float | None
    chosen_s: float | None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TailReason:
    """Why a slab was ordered to another role near the end of a batch; each field None if not readable.

    Attributes:
        running: requests that its engines had.
        backlog_s, after_s: seconds of the new role's backlog before the move, and with this slab.
        switch_s: expected seconds of the move.
    """

    running: int | None
    backlog_s: float | None
    after_s: float | None
    switch_s: float | None

    @property
    def gain_s(self) -> float | None:
        """Seconds by which the backlog was expected to become shorter, without those of the move."""
        if self.backlog_s is None or self.after_s is None or self.switch_s is None:
            return None
        return self.backlog_s - self.after_s - self.switch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleUse:
    """One role's engines in one batch; each field None if not readable.

    Attributes:
        slabs: at the end of the batch.
        idle: share of the engine seconds that it held in which no sequence ran.
        busy_s, held_s: engine seconds with a running sequence; of all that it held.
        engines: of one slab.
        span: slabs of one engine, if it is on several nodes.
    """

    slabs: int | None
    idle: float | None
    busy_s: float | None
    held_s: float | None
    engines: int = 1
    span: int = 1

    @property
    def slabs_per_engine(self) -> float:
        """Part of a slab that one engine fills, or number of slabs that it has."""
        return self.span / self.engines


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUse:
    """One batch: its iteration, seconds of sampling and judging, and its roles."""

    iteration: int
    seconds: float
    roles: Mapping[str, RoleUse]

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


def as_split_choice(event: Event) -> SplitChoice | None:
    """Returns the content of `split.choose`; None if its splits cannot be read."""
    before, after = _split(event.get("before")), _split(event.get("after"))
    if not before or not after or before.keys() != after.keys():
        return None
    return SplitChoice(
        before=before, after=after, predicted_s=amount_of(event, "predicted_s"),
        chosen_s=amount_of(event, "chosen_s"),
    )  # fmt: skip


def as_tail_reason(event: Event) -> TailReason:
    """Returns the reasons of a `slab.move` near the end of a batch."""
    return TailReason(
        running=whole_count(event, "running"), backlog_s=amount_of(event, "backlog_s"),
        after_s=amount_of(event, "after_s"), switch_s=amount_of(event, "switch_s"),
    )  # fmt: skip


def as_batch_use(event: Event) -> BatchUse | None:
    """Returns the content of `batch.load`; None if iteration, seconds or roles cannot be read."""
    iteration: Any = event.get("iteration")
    seconds, roles = amount_of(event, "seconds"), event.get("roles")
    if not is_count(iteration) or seconds is None or not isinstance(roles, dict):
        return None
    known = [(name, role) for name, role in roles.items() if is_engine_role(name) and isinstance(role, dict)]
    return BatchUse(
        iteration=iteration, seconds=seconds, roles={name: _role(role) for name, role in known[:MOST_ROLES]}
    )


def split_in_words(choice: SplitChoice) -> str:
    """Returns the roles whose number of slabs changes, and the predicted seconds."""
    roles = sorted(choice.before, key=lambda role: (choice.after[role] - choice.before[role], role))
    changed = [role for role in roles if choice.before[role] != choice.after[role]]
    words = ", ".join(f"{role} {choice.before[role]} to {choice.after[role]}" for role in changed)
    if choice.predicted_s is None or choice.chosen_s is None:
        return words
    return f"{words} ({choice.chosen_s:.1f} s predicted instead of {choice.predicted_s:.1f} s)"


def amount_of(event: Event, name: str) -> float | None:
    """Returns a number from 0 to `batch_loads.MOST`; None if there is none."""
    value = event.get(name)
    return float(value) if value is not None and is_amount(value) else None


def whole_count(event: Event, name: str) -> int | None:
    """Returns a whole number from 0 to `batch_loads.MOST`; None if there is none."""
    value: Any = event.get(name)
    return int(value) if is_count(value) else None


def _split(value: Any) -> dict[str, int] | None:
    if not isinstance(value, dict) or len(value) > MOST_ROLES:
        return None
    is_good = all(is_engine_role(role) and is_count(num) for role, num in value.items())
    return dict(value) if is_good else None


def _role(role: Event) -> RoleUse:
    slabs, engines, span = (whole_count(role, name) for name in ("slabs", "engines", "span"))
    idle = amount_of(role, "idle")
    return RoleUse(
        slabs=slabs, idle=idle if idle is not None and idle <= 1 else None,
        busy_s=amount_of(role, "busy_s"), held_s=amount_of(role, "held_s"),
        engines=max(1, engines or 1), span=max(1, span or 1),
    )  # fmt: skip
