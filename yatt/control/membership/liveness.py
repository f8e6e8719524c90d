"""Keep-alive messages between the leader and each other controller, and silence of lost controllers.

The leader watches all others, every other controller watches the leader. The event loop sends the messages,
so a controller with a blocked loop is silent, as intended.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable

from yatt import clock
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.core.requests import liveness as rules
from yatt.records.cluster import Alive
from yatt.records.load import NodeLoad

_LOG = logging.getLogger(__name__)
PERIOD_S = 1.0
TOLD_AT_ONCE = 128
"""Number of keep-alive messages that are sent per turn of the event loop."""


class Liveness:
    """Watches the other controllers for one controller.

    Args:
        on_lost: called once for each process of a peer without a message for `launch.node_silence_s`, with
            index, life and seconds.
        load: returns what this node's engines do, for the leader.
    """

    def __init__(
        self,
        node: Node,
        peers: Peers,
        on_lost: Callable[[int, int, float], None],
        load: Callable[[], NodeLoad],
    ) -> None:
        self._node, self._peers, self._on_lost, self._load = node, peers, on_lost, load
        self._began_s = clock.monotonic_s()
        self._watched = self._watch()
        self._heard: set[int] = set()  # since the last tick
        self._ever_heard: set[int] = set()
        peers.subscribe(invited=self._watch_again)

    def _watch_again(self, index: int) -> None:
        """Watches a newcomer; it has just sent a message."""
        self._watched = rules.watch_again(self._watched, index, grace_s=0.0)

    def _watch(self) -> rules.Watched:
        node = self._node
        partners = node.present - {node.index} if node.is_leader else frozenset({0})
        return rules.watch(partners, clock.monotonic_s(), grace_s=node.config.launch.start_timeout_s)

    def heard(self, index: int) -> None:
        """Records a message of that node."""
        self._heard.add(index)
        self._ever_heard.add(index)

    def silence_s(self, index: int) -> float:
        """Seconds since a watched peer's last message, without the time when this process was suspended.

        Before the first message, they count from the start of this controller. All but the leader watch the
        leader, index 0.
        """
        if index not in self._ever_heard:
            return clock.monotonic_s() - self._began_s
        return 0.0 if index in self._heard else self._watched.silence_s(index)

    async def _tell(self) -> None:
        """Sends a keep-alive message to each partner."""
        partners = (self._watched.silences.keys() - self._peers.lost) | self._peers.newcomers.keys()
        body = Alive() if self._node.is_leader else Alive(load=self._load())
        waiting = iter(partners)
        while some := tuple(itertools.islice(waiting, TOLD_AT_ONCE)):
            self._peers.tell_each(some, body)
            await asyncio.sleep(0)  # a thousand take tens of milliseconds, and orders should not wait

    async def run(self) -> None:
        """Sends keep-alive messages and counts silences, forever. Starts after the rendezvous: a node that
        never sends a message is lost `launch.start_timeout_s` later at the earliest."""
        self._watched = self._watch()
        limit_s = self._node.config.launch.node_silence_s
        while True:
            await self._tell()
            await asyncio.sleep(PERIOD_S)
            now_s = clock.monotonic_s()
            heard, self._heard = self._heard, set()
            self._watched, lost = rules.tick(self._watched, now_s, heard, period_s=PERIOD_S, limit_s=limit_s)
            for index in lost:
                silence_s = self._watched.silence_s(index)
                _LOG.warning("node%d was not heard of for %.1f s", index, silence_s)
                self._on_lost(index, self._peers.newest_life(index), silence_s)
