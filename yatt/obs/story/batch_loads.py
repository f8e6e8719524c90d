"""Reads what a run measured of each batch: event `batch.load` of its event log.

The log is text from outside: an event with a value that is missing, of another type, not finite or out of
range is skipped and counted, and none raises an error.
"""

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.adapters.files.lines import Record, is_number
from yatt.adapters.files.segments import SegmentTail
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT, genrm_role
from yatt.obs.story.events import as_event

KIND = "batch.load"
LAST = 3
"""Number of a run's last batches that are used."""

MOST = 1e9
"""Largest value of any field."""

MOST_LENGTHS = 10_001
MOST_ENGINES = 64
"""Largest number of engines on a slab."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """One engine role in one batch. `speed` is None if it was not measured; `idle` is a share of its time."""

    speed: EngineSpeed | None
    room: int
    engines: int
    slabs: int
    idle: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """One batch as a run measured it.

    Attributes:
        seconds: of sampling and judging.
        num_samples: completions of the batch.
        lengths: quantiles of tokens of the policy per completion, from 0% to 100% at even distances.
        verdicts: mean tokens of verdicts per completion, by role of the GenRM.
        roles: by role.
        switch_s: seconds of a switch; 0 if none was measured.
        train_s: seconds of training, saving, publication and loading of the iteration before; 0 if unknown.
        kept: share of the groups that were not dropped.
    """

    attempt: int
    iteration: int
    seconds: float
    num_samples: int
    lengths: tuple[float, ...]
    verdicts: Mapping[str, float]
    roles: Mapping[str, RoleLoad]
    switch_s: float
    train_s: float
    kept: float


def read_batch_loads(events: Path, num: int = LAST) -> tuple[list[BatchLoad], int]:
    """Returns the last `num` batches of a run's newest attempt that has any, oldest first, and the number of
    unreadable events of this kind."""
    found, num_bad = deque[BatchLoad](maxlen=num), 0
    for batch in SegmentTail(events, as_event).batches():
        for event in batch:
            if event["kind"] == KIND:
                load = as_batch_load(event)
                num_bad += load is None
                found += [load] if load is not None else []
    return [load for load in found if load.attempt == found[-1].attempt], num_bad


def as_batch_load(event: Record) -> BatchLoad | None:
    """Returns the event's content; None if any part of it is damaged."""
    lengths: Any = event.get("lengths")
    roles = _roles(event.get("roles"))
    verdicts = _verdicts(event.get("verdicts"))
    names = ("seconds", "switch_s", "train_s")
    if roles is None or verdicts is None or not _are_lengths(lengths):
        return None
    if not all(is_amount(event.get(name)) for name in names):
        return None
    if not all(is_count(event.get(name)) for name in ("attempt", "iteration", "num_samples")):
        return None
    kept: Any = event.get("kept")
    if not is_amount(kept) or not 0 < kept <= 1:
        return None
    return BatchLoad(
        attempt=event["attempt"], iteration=event["iteration"], num_samples=event["num_samples"],
        lengths=tuple(map(float, lengths)), verdicts=verdicts, roles=roles, kept=float(kept),
        **{name: float(event[name]) for name in names},
    )  # fmt: skip


def _roles(value: Any) -> dict[str, RoleLoad] | None:
    if not isinstance(value, dict):
        return None
    found = {name: _role(each) for name, each in value.items() if is_engine_role(name)}
    roles = {name: role for name, role in found.items() if role is not None}
    return roles if len(roles) == len(value) else None


def _role(value: Any) -> RoleLoad | None:
    if not isinstance(value, dict):
        return None
    measured: list[Any] = [value.get(name, "") for name in ("step_s", "sequence_s", "idle")]
    amounts = [0.0 if each is None else each for each in measured]  # None: nothing was measured
    counts: list[Any] = [value.get(name) for name in ("room", "engines", "slabs")]
    if not all(map(is_amount, amounts)) or not all(map(is_count, counts)) or amounts[2] > 1:
        return None
    if counts[1] > MOST_ENGINES:
        return None
    step_s, sequence_s, idle = map(float, amounts)
    speed = EngineSpeed(step_s, sequence_s) if step_s + sequence_s > 0 else None
    room, engines, slabs = counts
    return RoleLoad(speed=speed, room=room, engines=max(engines, 1), slabs=slabs, idle=idle)


def _verdicts(value: Any) -> dict[str, float] | None:
    if not isinstance(value, dict):
        return None
    are_good = all(is_engine_role(role) and is_amount(tokens) for role, tokens in value.items())
    return {role: float(tokens) for role, tokens in value.items()} if are_good else None


def is_engine_role(name: Any) -> bool:
    """Whether the value is the name of an engine role."""
    return isinstance(name, str) and (name == ROLLOUT or name.startswith(genrm_role("")))


def is_amount(value: Any) -> bool:
    """Whether the value is a number from 0 to `MOST`."""
    return is_number(value) and math.isfinite(value) and 0 <= value <= MOST


def is_count(value: Any) -> bool:
    """Whether the value is a whole number from 0 to `MOST`."""
    return type(value) is int and 0 <= value <= MOST


def _are_lengths(value: Any) -> bool:
    if not isinstance(value, list) or not 2 <= len(value) <= MOST_LENGTHS or not all(map(is_amount, value)):
        return False
    return all(low <= high for low, high in itertools.pairwise(value))


def mean_lengths(loads: Sequence[BatchLoad]) -> tuple[float, ...]:
    """Returns the mean of each quantile of several batches; only of those with as many as the last has."""
    alike = [load.lengths for load in loads if len(load.lengths) == len(loads[-1].lengths)]
    return tuple(sum(each) / len(each) for each in zip(*alike, strict=True))
