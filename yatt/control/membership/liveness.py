"""Signs of life between the leader and every other controller, and who has been silent too long.

The leader watches all others, every other watches the leader. They come from the event loop, so a
controller whose loop stands still is silent, which is what they are to show.
"""

import asyncio
from collections.abc import Callable

from yatt import clock
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.core import liveness as rules
from yatt.records.cluster import Alive

PERIOD_S = 1.0


class Liveness:
    """One controller's view of the others.

    Args:
        on_lost: called once for each peer not heard of for `launch.node_silence_s`, with its index and
            the seconds.
    """

    def __init__(self, node: Node, peers: Peers, on_lost: Callable[[int, float], None]) -> None:
        self._node, self._peers, self._on_lost = node, peers, on_lost
        partners = node.present - {node.index} if node.is_leader else frozenset({0})
        grace_s = node.config.launch.start_timeout_s
        self._watched = rules.watch(partners, clock.monotonic_s(), grace_s=grace_s)
        self._heard: set[int] = set()  # since the last tick

    def heard(self, index: int) -> None:
        """A message of that node has come."""
        self._heard.add(index)

    def silence_s(self, index: int) -> float:
        """Seconds since a watched peer was heard of, as far as this controller was awake itself.

        Before its first word they count from the end of `launch.start_timeout_s`. Non-leaders watch the
        leader, index 0.
        """
        return 0.0 if index in self._heard else self._watched.silence_s(index)

    async def run(self) -> None:
        """Give signs of life and count silences, for ever."""
        limit_s = self._node.config.launch.node_silence_s
        partners = set(self._watched.silences)
        while True:
            for index in partners - self._peers.lost:
                await self._peers.tell(index, Alive())
            await asyncio.sleep(PERIOD_S)
            now_s = clock.monotonic_s()
            heard, self._heard = self._heard, set()
            self._watched, lost = rules.tick(self._watched, now_s, heard, period_s=PERIOD_S, limit_s=limit_s)
            for index in lost:
                self._on_lost(index, self.silence_s(index))
