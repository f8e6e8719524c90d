"""The writer threads of one controller."""

import logging
from pathlib import Path

from yatt.adapters.segments import Rotation
from yatt.adapters.shortened import ShortenedFile
from yatt.adapters.writer import BackgroundWriter
from yatt.control.node import Node

_LOG = logging.getLogger(__name__)
LAST_LINES_S = 30.0
"""Longest time to write the last events and metrics at the end."""

LAST_GROUPS_S = 5.0
"""Longest time to write the last finished prompt groups at the end."""

LAST_ROLLOUTS_S = 10.0
"""Longest time to write the last recorded rollouts at the end."""


class Writers:
    """Each kind of file has a thread of its own, so that one that is large or fails delays no other.

    Attributes:
        lines: events, metrics and samples.
        groups: finished prompt groups (`yatt.control.rollouts.kept`).
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
