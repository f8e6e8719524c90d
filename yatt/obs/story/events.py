"""The event log: one JSON object per event (`yatt.records.events`), for programs and for the report.

Every process of a run emits events. Only the leader appends to ``events.jsonl``; the other controllers send
their lines to it. The log is kept in segments (`yatt.adapters.files.segments`).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from yatt import clock
from yatt.adapters.files.lines import Record
from yatt.adapters.files.segments import newest_records
from yatt.records.events.attempts import AttemptEnded
from yatt.records.events.event import Event
from yatt.records.events.log import logged_event

TAIL_BYTES = 1 << 20
"""Bytes read from the end of the log to find the end of an attempt."""


def reason_of_end(path: Path, attempt: int) -> str:
    """Returns the leader's recorded reason for the end of an attempt; empty if there is none."""
    for event in newest_records(path, TAIL_BYTES):
        logged = logged_event(event)
        if logged is not None and logged.attempt == attempt and isinstance(logged.event, AttemptEnded):
            return logged.event.reason
    return ""


class EventLog:
    """Adds the stamps to events and passes the lines to `sink`.

    Args:
        sink: called with each line; the leader's appends it, another controller's sends it to the leader.
    """

    def __init__(self, *, attempt: int, node: int, role: str, sink: Callable[[str], None]) -> None:
        self._fixed = {"attempt": attempt, "node": node, "role": role}
        self._sink = sink

    def emit(self, event: Event) -> None:
        """Records one event."""
        stamp = {"t": clock.monotonic_ns(), "wall": clock.wall_iso()}
        fields: dict[str, Any] = msgspec.to_builtins(event)
        self._sink(_line({**stamp, **self._fixed, **fields}))


def _line(record: Record) -> str:
    """Returns one line of JSON. Half a character, as in an error about a file's name, becomes a question
    mark: no event may end what it tells of."""
    try:
        return msgspec.json.encode(record).decode()
    except UnicodeEncodeError:
        return json.dumps(record, ensure_ascii=False).encode(errors="replace").decode()
