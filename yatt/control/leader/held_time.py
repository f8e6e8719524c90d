"""For how long roles have held slabs."""

from collections.abc import Mapping

from yatt import clock
from yatt.core.moves import Moves
from yatt.core.placement import TRAINER, Slab


def num_held(moves: Moves, fixed: Mapping[Slab, str]) -> dict[str, int]:
    """Returns the number of slabs that engines of each role hold: those of the table, and `fixed` ones that
    are not in it."""
    found = moves.num_there()
    found.update(role for slab, role in fixed.items() if slab.node not in moves.lost)
    return {role: num for role, num in found.items() if role != TRAINER and num}


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
