"""The event log: one JSON object per event, for programs and for the report.

Every process of a run emits events. Only the leader appends to ``events.jsonl``; the other controllers send
their lines to it. The log is kept in segments (`yatt.adapters.files.segments`).
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from yatt import clock
from yatt.adapters.files.lines import Record, is_number
from yatt.adapters.files.segments import newest_records

TAIL_BYTES = 1 << 20
"""Bytes read from the end of the log to find the end of an attempt."""

UNREADABLE = "judge.unreadable"
"""An example of a GenRM's answers without a verdict."""

_SLAB: dict[str, type] = {"slab": str, "cause": str}
FIELDS: dict[str, dict[str, type]] = {
    "attempt.start": {"nodes": int},
    "attempt.end": {"exit_code": int, "reason": str},
    "attempt.resume": {"iteration": int},
    "rollout.group.drop": {"number": int, "reason": str},
    UNREADABLE: {"genrm": str, "number": int, "why": str},
    "validation.failed": {
        "iteration": int,
        "source": str,
        "reward": str,
        "failed": int,
        "count": int,
        "why": str,
    },
    "phase.begin": {"phase": str, "iteration": int},
    "phase.part": {"phase": str, "iteration": int, "part": str},
    "batch.begin": {"iteration": int, "policy_version": int},
    "batch.end": {"iteration": int},
    "lease.grant": {"slab": str, "holder": str},
    "lease.release": {"slab": str},
    "lease.expire": _SLAB,
    "lease.not_free": _SLAB,
    "engine.expire": {"worker": str, "cause": str},
    "lease.quarantine": _SLAB,
    "node.joined": {"node": int, "life": int},
    "node.lost": {"node": int, "why": str, "goes_on": bool},
    "split.choose": {"before": dict, "after": dict},
    "split.failed": {"error": str},
    "slab.move": {"slab": str, "before": str, "after": str, "reason": str},
    "slab.moved": {"slab": str, "after": str, "has_moved": bool},
    "engine.unfit": {"slab": str, "holder": str, "error": str},
    "worker.start": {"worker": str, "pid": int},
    "worker.end": {"worker": str, "how": str},
    "worker.failed": {"worker": str, "error": str},
    "worker.delay": {"worker": str, "error": str},
    "nursery.end": {"nursery": str, "why": str},
    "ckpt.begin": {"iteration": int, "size_bytes": int},
    "ckpt.commit": {"iteration": int, "size_bytes": int},
    "ckpt.skip": {"reason": str},
    "ckpt.fail": {"iteration": int, "error": str},
    "ckpt.postpone": {"iteration": int, "in_flight": int},
    "ckpt.backpressure": {"iteration": int, "size_bytes": int, "seconds": float},
    "ckpt.lost": {"iteration": int, "error": str},
    "ckpt.local": {"iteration": int, "error": str},
    "ckpt.given_up": {"iteration": int},
    "ckpt.kept": {"iteration": int, "size_bytes": int},
    "store.wait": {"who": str, "error": str},
    "judge.wait": {"genrm": str, "error": str},
    "signal": {"name": str},
    "alarm.begin": {"alarm": str, "since": int, "message": str},
    "alarm.end": {"alarm": str, "iteration": int},
    "alarm.drops": {"message": str},
    "telemetry.late": {"seconds": float, "lost": int},
    "rollouts.lost": {"iteration": int, "samples": int, "error": str},
    "reward.kill": {"worker": str, "limit_s": float},
    "media.kill": {"worker": str, "limit_s": float},
    "media.room": {"cache_bytes": int},
}
"""Fields of an event that readers need, by kind."""


def inputs_said_changed(event: Mapping[str, Any]) -> list[str]:
    """Returns what an event `attempt.resume` names: inputs that are others than in its checkpoint."""
    found = event.get("changed", ())
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def reason_of_end(path: Path, attempt: int) -> str:
    """Returns the leader's recorded reason for the end of an attempt; empty if there is none."""
    for event in newest_records(path, TAIL_BYTES):
        if (event.get("kind"), event.get("attempt")) == ("attempt.end", attempt):
            return str(event.get("reason", ""))
    return ""


def as_event(record: Record) -> Record | None:
    """Returns the record if it is a valid event: with its stamps, and the fields that readers need."""
    needed = {"kind": str, "wall": str, "attempt": int, **FIELDS.get(str(record.get("kind")), {})}
    if any(type(record.get(name)) is not kind for name, kind in needed.items()):
        return None
    if any(type(value) is int and not is_number(value) for value in record.values()):
        return None
    if type(record.get("t", 0)) is not int or type(record.get("node", 0)) is not int:
        return None
    return record if _is_time(record["wall"]) else None


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).timestamp() > 0
    except (ValueError, OverflowError, OSError):
        return False


class EventLog:
    """Adds the stamps to events and passes the lines to `sink`.

    Args:
        sink: called with each line; the leader's appends it, another controller's sends it to the leader.
    """

    def __init__(self, *, attempt: int, node: int, role: str, sink: Callable[[str], None]) -> None:
        self._fixed = {"attempt": attempt, "node": node, "role": role}
        self._sink = sink

    def emit(self, kind: str, **fields: Any) -> None:
        """Records one event. Values must be JSON."""
        stamp = {"t": clock.monotonic_ns(), "wall": clock.wall_iso()}
        self._sink(msgspec.json.encode({**stamp, **self._fixed, "kind": kind, **fields}).decode())
