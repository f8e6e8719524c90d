"""Who has been silent for how long, and how much time counts: the observer's rules, pure.

Before its first word a peer is given a grace: it may still be looking for the others' addresses. Only time
in which the observer itself was awake counts. Each tick adds the time since the last one, but never more
than twice the period between ticks; a tick that comes later than that shows that the observer stood still,
so it blames nobody: what the others said meanwhile is still unread. No clock of another host is looked at.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Seconds of silence of each peer, below 0 while its grace lasts, and those declared lost."""

    silences: Mapping[int, float]
    lost: frozenset[int] = frozenset()
    ticked_s: float

    def silence_s(self, index: int) -> float:
        """How long a peer had been silent at the last tick; 0.0 if it is not under watch."""
        return max(0.0, self.silences.get(index, 0.0))


def watch(peers: frozenset[int], now_s: float, *, grace_s: float) -> Watched:
    """Nobody heard of yet."""
    return Watched(silences=dict.fromkeys(sorted(peers), -grace_s), ticked_s=now_s)


def tick(
    watched: Watched, now_s: float, heard: Collection[int], *, period_s: float, limit_s: float
) -> tuple[Watched, list[int]]:
    """Time passed: the next state, and the peers that are lost from now on.

    Looks at every peer, which a message must not: with N peers, N messages a tick would cost N x N.

    Args:
        heard: peers that gave a sign of life since the last tick. One that was declared lost stays lost.
    """
    passed_s = now_s - watched.ticked_s
    is_late = passed_s > 2 * period_s
    counted_s = min(passed_s, 2 * period_s)
    silences = {
        peer: (0.0 if peer in heard else silent) + counted_s for peer, silent in watched.silences.items()
    }
    fallen = [] if is_late else [peer for peer, silent in silences.items() if silent >= limit_s]
    newly = [peer for peer in fallen if peer not in watched.lost]
    return Watched(silences=silences, lost=watched.lost | set(newly), ticked_s=now_s), newly


@dataclass(frozen=True, slots=True, kw_only=True)
class AwakeClock:
    """Seconds that an observer was awake: between two ticks at most twice the period it ticks with.

    What happened while it stood still is unread when it wakes, so that time must be nobody's silence.
    """

    real_s: float
    awake_s: float = 0.0

    def at(self, now_s: float, *, period_s: float) -> float:
        """The awake time at `now_s`."""
        return self.awake_s + min(max(0.0, now_s - self.real_s), 2 * period_s)

    def tick(self, now_s: float, *, period_s: float) -> "AwakeClock":
        """The observer is awake now."""
        return AwakeClock(real_s=now_s, awake_s=self.at(now_s, period_s=period_s))
