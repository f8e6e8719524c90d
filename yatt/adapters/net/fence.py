"""Drops frames of older attempts and repeated frames, so that a message delivered twice is handled once."""

from yatt.core.requests.delivery import DuplicateFilter
from yatt.errors import StaleAttempt
from yatt.records import message as m


class Fence:
    """Refuses frames of lower attempts and repeated frames."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self._seen: dict[str, DuplicateFilter] = {}

    def is_current(self, sender: str, frame: m.Frame) -> bool:
        """Whether the frame is of this process's attempt.

        Raises:
            StaleAttempt: the sender belongs to a newer attempt, so this process is stale.
        """
        if frame.attempt > self.attempt:
            raise StaleAttempt(f"{sender} is of attempt {frame.attempt}, this process of {self.attempt}")
        return frame.attempt == self.attempt

    def admits(self, sender: str, frame: m.Frame) -> bool:
        """Whether to handle `frame`; False for a stale attempt or a repeated frame.

        Raises:
            StaleAttempt: see `is_current`.
        """
        if not self.is_current(sender, frame):
            return False
        seen = self._seen.get(sender)
        if seen is None:  # `setdefault` would create a filter for every frame
            seen = self._seen[sender] = DuplicateFilter()
        return seen.admits(frame.seq)

    def forget(self, sender: str, seq: int) -> None:
        """Allows this frame of the sender once more."""
        self._seen.setdefault(sender, DuplicateFilter()).forget(seq)
