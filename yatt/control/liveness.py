"""Beats between the leader and every other controller, and who has been silent too long.

The leader watches all others, every other watches the leader. Beats come from the event loop, so a
controller whose loop stands still is silent, which is what a beat is to show.
"""

import asyncio
from collections.abc import Callable

from yatt import clock
from yatt.control.node import Node
from yatt.control.peers import Peers
from yatt.core import liveness as rules
from yatt.records.cluster import Beat

BEAT_S = 1.0


class Liveness:
    """One controller's view of the others.

    Args:
        on_lost: called once for each peer not heard of for `launch.node_silence_s`, with its index and
            the seconds.
    """

    def __init__(self, node: Node, peers: Peers, on_lost: Callable[[int, float], None]) -> None:
        self._node, self._peers, self._on_lost = node, peers, on_lost
        partners = node.present - {node.index} if node.is_leader else frozenset({0})
        self._watched = rules.watch(partners, clock.monotonic_s())

    def heard(self, index: int) -> None:
        """A message of that node has come."""
        self._watched = rules.heard(self._watched, index)

    def silence_s(self, index: int) -> float:
        """Seconds since a watched peer was heard of, as far as this controller was awake itself; 0.0 before
        its first word. Non-leaders watch the leader, index 0.
        """
        return self._watched.silence_s(index)

    async def run(self) -> None:
        """Say beats and count silences, for ever."""
        limit_s = self._node.config.launch.node_silence_s
        while True:
            for index in self._watched.peers - self._peers.lost:
                await self._peers.tell(index, Beat())
            await asyncio.sleep(BEAT_S)
            now_s = clock.monotonic_s()
            self._watched, lost = rules.tick(self._watched, now_s, period_s=BEAT_S, limit_s=limit_s)
            for index in lost:
                self._on_lost(index, self.silence_s(index))
