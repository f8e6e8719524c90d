"""Lines of an event log as events."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from yatt.records.events import attempts, groups, processes, saves, slabs
from yatt.records.events.event import Count, Event, FrequentEvent, Index, Ticks

SUBJECTS = (attempts, processes, slabs, saves, groups)

KINDS: dict[str, type[Event]] = {
    str(each.__struct_config__.tag): each
    for subject in SUBJECTS
    for each in vars(subject).values()
    if isinstance(each, type) and issubclass(each, Event) and each not in (Event, FrequentEvent)
}
"""Every class of events by its kind, in the order of `docs/events.md`."""


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event with its stamps.

    Attributes:
        wall: when, ISO-8601.
        ticks_ns: of the node's monotonic clock; 0 if it is not known.
    """

    event: Event
    attempt: int
    wall: str
    ticks_ns: int = 0
    node: int = 0


def logged_event(record: Mapping[str, Any]) -> LoggedEvent | None:
    """Reads a line of the log; None if it is damaged. A kind that is not known gives a plain `Event`."""
    try:
        stamps = msgspec.convert(record, _Stamps)
        kind = KINDS.get(stamps.kind)
        event = Event() if kind is None else msgspec.convert(record, kind)
    except (msgspec.ValidationError, OverflowError, UnicodeError):  # half a character in place of a number
        return None
    if not _is_time(stamps.wall):
        return None
    return LoggedEvent(event, stamps.attempt, stamps.wall, stamps.t, stamps.node)


class _Stamps(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    wall: str
    attempt: Count
    t: Ticks = 0
    node: Index = 0


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).timestamp() > 0
    except (ValueError, OverflowError, OSError):
        return False
