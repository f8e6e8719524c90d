"""What a follower keeps in its folder over all starts of a run: the tracker's run id, and the last steps.

A file that cannot be read counts as missing: the tracker then gets a new run, or some rows again.
"""

import contextlib
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from yatt.adapters.files import publish, read_or_none

ROWS, SAMPLES = "last_step", "last_samples"
"""Files with the highest step whose row, or whose samples, are logged."""

_RUN_ID = re.compile(rb"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True, slots=True)
class TrackerState:
    """The files of one follower.

    Args:
        folder: the tracker's folder in the run folder; it exists.
    """

    folder: Path

    def run_id(self) -> str:
        """Returns the tracker's run id; creates it at the first start."""
        known = read_or_none(self.folder / "run_id")
        if known is not None and _RUN_ID.fullmatch(known.strip()):
            return known.decode().strip()
        fresh = secrets.token_hex(6)
        publish(self.folder / "run_id", fresh.encode())
        return fresh

    def last(self, name: str = ROWS) -> int:
        """Returns the highest step logged so far; -1 before the first."""
        known = read_or_none(self.folder / name)
        text = (known or b"").decode(errors="replace").strip()
        return int(text) if text.isdecimal() and text.isascii() else -1

    def logged(self, step: int, name: str = ROWS) -> None:
        """Notes that a step is logged. If this fails, a later start logs it again."""
        with contextlib.suppress(OSError):
            publish(self.folder / name, str(step).encode())
