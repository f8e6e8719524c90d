"""The writer threads of one controller.

Failures of the event log itself, and waits for the checkpoint store, are reported in the event log.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from yatt.adapters.files.segments import Rotation
from yatt.adapters.files.shortened import ShortenedFile
from yatt.adapters.files.writer import BackgroundWriter
from yatt.control.node import Node
from yatt.obs.story.events import EventLog
from yatt.records.events.attempts import TelemetryLate
from yatt.records.events.saves import StoreAwaited

_LOG = logging.getLogger(__name__)
LAST_LINES_S = 30.0
"""Longest time to write the last events and metrics at the end."""

LAST_GROUPS_S = 5.0
"""Longest time to write the last finished prompt groups at the end."""

LAST_ROLLOUTS_S = 10.0
"""Longest time to write the last recorded rollouts at the end."""

CHECK_S = 1.0


def store_sayer(events: EventLog, who: str) -> Callable[[str], None]:
    """Returns the function with which a `PatientStore` of this process reports waits, from any thread.

    Call it in the event loop that emits the events.
    """
    loop = asyncio.get_running_loop()

    def say(error: str) -> None:
        loop.call_soon_threadsafe(partial(events.emit, StoreAwaited(who=who, error=error)))

    return say


async def watch_writer(writer: BackgroundWriter, events: EventLog, period_s: float = CHECK_S) -> None:
    """Watches the writer, forever; emits one event per failure, with the number of lost lines."""
    failing_s, told = 0.0, 0
    while True:
        await asyncio.sleep(period_s)
        now_s, lost = writer.failing_s, writer.num_lost
        if not now_s and (failing_s or lost > told):
            events.emit(TelemetryLate(seconds=round(failing_s, 1), lost=lost - told))
            told = lost
        elif now_s and not failing_s:
            _LOG.warning("events cannot be written; they wait in memory")
        failing_s = now_s


class Writers:
    """Each kind of file has a thread of its own, so that one that is large or fails delays no other.

    Attributes:
        lines: events, metrics and samples.
        groups: finished prompt groups (`yatt.control.rollouts.groups.kept`).
        rollouts: recorded rollouts (`yatt.control.rollouts.recording`).
    """

    def __init__(self, node: Node) -> None:
        section, samples = node.config.logging, node.paths.samples
        rotation = Rotation(node.paths.events, section.events_file_bytes, section.events_files)
        shortened = ShortenedFile(samples, section.samples_file_bytes)

        def place(path: Path) -> Path:
            if path == samples:
                shortened.shorten()
            return rotation.place(path)

        self.lines = BackgroundWriter(place=place)
        self.groups = BackgroundWriter()
        self.rollouts = BackgroundWriter()

    def close(self) -> None:
        """Writes what waits, as far as the limits allow, and ends the threads. Blocks."""
        self.groups.close(LAST_GROUPS_S)
        if not self.rollouts.close(LAST_ROLLOUTS_S):
            _LOG.warning("the last rollouts were not recorded: there was no time")
        if not self.lines.close(LAST_LINES_S):
            _LOG.warning("the last lines could not be written: the run folder does not answer")
