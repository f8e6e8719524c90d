"""For how long roles have held slabs."""

from collections.abc import Mapping

from yatt import clock


class HeldTime:
    """Time for which roles have held slabs while batches were sampled."""

    def __init__(self) -> None:
        self._counts: Mapping[str, int] = {}
        self._since_s = clock.monotonic_s()
        self._held_s: dict[str, float] = {}

    def count(self, counts: Mapping[str, int]) -> None:
        """Begins a time in which roles hold so many slabs."""
        now_s = clock.monotonic_s()
        for role, num in self._counts.items():
            self._held_s[role] = self._held_s.get(role, 0.0) + num * (now_s - self._since_s)
        self._counts, self._since_s = counts, now_s

    def take(self) -> dict[str, float]:
        """Returns slab-seconds by role since the last call."""
        self.count(self._counts)
        held, self._held_s = self._held_s, {}
        return held
