"""Reports to the trainer nodes how many requests this node's engines accept."""

import asyncio
import contextlib

from yatt.adapters.net.crowd import Spawned
from yatt.control.gpus.engines import LocalEngines
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.errors import YattError
from yatt.records.cluster import EngineRoom
from yatt.records.message import Failed

AGAIN_S, MOST_TRIES = 1.0, 120
"""Pause before a report that was refused is sent again, and how often it is sent."""


class RoomAnnouncer:
    """Sends `EngineRoom` to every other trainer node whenever the room of the engines here changes.

    A newcomer's roles are closed at first: it takes requests of a role once that is opened.
    """

    def __init__(self, node: Node, engines: LocalEngines, peers: Peers) -> None:
        self._node, self._engines, self._peers = node, engines, peers
        self._tasks = Spawned()
        self._closed = set(node.placement.pools) if node.is_newcomer else set[str]()
        engines.subscribe(self._changed)

    def open(self, *roles: str) -> None:
        """Reports the room of these roles from now on."""
        for role in self._closed & set(roles):
            self._closed.discard(role)
            self._changed(role)

    def _changed(self, role: str) -> None:
        if role in self._closed:
            return
        for index in set(self._node.placement.trainer_nodes) - {self._node.index}:
            self._tasks.spawn(self._tell(index, role))

    async def _tell(self, index: int, role: str) -> None:
        with contextlib.suppress(YattError):  # the leader handles lost nodes
            for _ in range(MOST_TRIES):
                body = EngineRoom(role=role, room=self._engines.room(role), version=self._engines.version)
                answer = await self._peers.request(index, body, self._node.config.launch.phase_timeout_s)
                if not isinstance(answer, Failed):
                    return
                await asyncio.sleep(AGAIN_S)  # the node has not heard yet that this one was admitted
