"""Emits events about failures of the event log itself, after it can be written again."""

import asyncio
import logging

from yatt.adapters.writer import BackgroundWriter
from yatt.obs.events import EventLog

_LOG = logging.getLogger(__name__)
CHECK_S = 1.0


async def watch_writer(writer: BackgroundWriter, events: EventLog, period_s: float = CHECK_S) -> None:
    """Watches the writer, forever; emits one event per failure, with the number of lost lines."""
    failing_s, told = 0.0, 0
    while True:
        await asyncio.sleep(period_s)
        now_s, lost = writer.failing_s, writer.num_lost
        if not now_s and (failing_s or lost > told):
            events.emit("telemetry.late", seconds=round(failing_s, 1), lost=lost - told)
            told = lost
        elif now_s and not failing_s:
            _LOG.warning("events cannot be written; they wait in memory")
        failing_s = now_s
