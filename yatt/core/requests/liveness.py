"""Silence of peers: the rules by which an observer declares a peer lost. Pure.

Before its first message a peer has a grace period: it may still be looking for the others' addresses. Only
time in which the observer itself ran counts: each tick adds the time since the last one, but at most twice
the tick period. A later tick shows that the observer was stopped, so no peer is declared lost: messages that
arrived meanwhile are still unread. No clock of another host is used.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Seconds of silence of each peer, below 0 during its grace period, and the peers declared lost."""

    silences: Mapping[int, float]
    lost: frozenset[int] = frozenset()
    ticked_s: float

    def silence_s(self, index: int) -> float:
        """Returns the seconds of silence of a peer at the last tick; 0.0 if it is not watched."""
        return max(0.0, self.silences.get(index, 0.0))


def watch(peers: frozenset[int], now_s: float, *, grace_s: float) -> Watched:
    """Returns the initial state, before any message."""
    return Watched(silences=dict.fromkeys(sorted(peers), -grace_s), ticked_s=now_s)


def watch_again(watched: Watched, peer: int, *, grace_s: float) -> Watched:
    """Watches a later process of a peer, from before its first message, whatever became of the former one."""
    silences = {**watched.silences, peer: -grace_s}
    return Watched(silences=silences, lost=watched.lost - {peer}, ticked_s=watched.ticked_s)


def tick(
    watched: Watched, now_s: float, heard: Collection[int], *, period_s: float, limit_s: float
) -> tuple[Watched, list[int]]:
    """Handles a tick: returns the next state, and the peers that are lost from now on.

    Checks every peer; doing so per message would cost N x N with N peers.

    Args:
        heard: peers that sent a message since the last tick. A peer that was declared lost stays lost
            until `watch_again`.
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
    """Seconds in which an observer ran: between two ticks at most twice the tick period.

    Messages that arrived while it was stopped are unread, so that time must not count as silence.
    """

    real_s: float
    awake_s: float = 0.0

    def at(self, now_s: float, *, period_s: float) -> float:
        """Returns the running time at `now_s`."""
        return self.awake_s + min(max(0.0, now_s - self.real_s), 2 * period_s)

    def tick(self, now_s: float, *, period_s: float) -> "AwakeClock":
        """Returns the clock after a tick at `now_s`."""
        return AwakeClock(real_s=now_s, awake_s=self.at(now_s, period_s=period_s))
