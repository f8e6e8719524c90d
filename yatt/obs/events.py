"""The event log: one JSON object an event, for machines and for the report.

Every process of a run emits; the leader alone appends to ``events.jsonl``, the other controllers send
their lines to it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from yatt import clock

TAIL_BYTES = 1 << 20
"""The end of an attempt is among its last events."""


def reason_of_end(path: Path, epoch: int) -> str:
    """Why the leader ended an attempt, by its own last word; empty if it left none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict) and (event.get("kind"), event.get("epoch")) == ("attempt.end", epoch):
            return str(event["reason"])
    return ""


class EventLog:
    """Stamps events and hands the lines on.

    Args:
        sink: gets each line; the leader's appends it, another controller's sends it to the leader.
    """

    def __init__(self, *, epoch: int, node: int, role: str, sink: Callable[[str], None]) -> None:
        self._fixed = {"epoch": epoch, "node": node, "role": role}
        self._sink = sink

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event. Values must be JSON."""
        stamp = {"t": clock.monotonic_ns(), "wall": clock.wall_iso()}
        self._sink(msgspec.json.encode({**stamp, **self._fixed, "kind": kind, **fields}).decode())
