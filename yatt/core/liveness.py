"""Who has been silent for how long: the observer's rule, pure.

A peer is under watch from its first word on: until then it may still be looking for the others'
addresses, which has a deadline of its own. Only time in which the observer itself was awake counts. Each
tick adds the time since the last one, but never more than twice the period between ticks; a tick that
comes later than that shows that the observer stood still, so it blames nobody: what the others said
meanwhile is still unread. No clock of another host is looked at.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Seconds of silence of each peer that was ever heard of, and those that were declared lost."""

    peers: frozenset[int]
    silences: tuple[tuple[int, float], ...] = ()
    lost: frozenset[int] = frozenset()
    ticked_s: float

    def silence_s(self, index: int) -> float:
        """How long a peer had been silent at the last tick; 0.0 before its first word."""
        return dict(self.silences).get(index, 0.0)


def watch(peers: frozenset[int], now_s: float) -> Watched:
    """Nobody heard of yet."""
    return Watched(peers=peers, ticked_s=now_s)


def heard(watched: Watched, index: int) -> Watched:
    """A sign of life. One that was declared lost stays lost."""
    if index not in watched.peers:
        return watched
    others = [(peer, silent) for peer, silent in watched.silences if peer != index]
    return replace(watched, silences=tuple(sorted([*others, (index, 0.0)])))


def tick(watched: Watched, now_s: float, *, period_s: float, limit_s: float) -> tuple[Watched, list[int]]:
    """Time passed: the next state, and the peers that are lost from now on."""
    passed_s = now_s - watched.ticked_s
    is_late = passed_s > 2 * period_s
    counted_s = min(passed_s, 2 * period_s)
    silences = tuple((peer, silent + counted_s) for peer, silent in watched.silences)
    fallen = [] if is_late else [peer for peer, silent in silences if silent >= limit_s]
    newly = [peer for peer in fallen if peer not in watched.lost]
    return replace(watched, silences=silences, lost=watched.lost | set(newly), ticked_s=now_s), newly
