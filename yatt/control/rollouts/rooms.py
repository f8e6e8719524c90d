"""Reports to the trainer nodes how many requests this node's engines accept."""

import asyncio
import contextlib

from yatt.control.gpus.engines import LocalEngines
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.errors import YattError
from yatt.records.cluster import EngineRoom


class RoomAnnouncer:
    """Sends `EngineRoom` to every other trainer node whenever the room of the engines here changes."""

    def __init__(self, node: Node, engines: LocalEngines, peers: Peers) -> None:
        self._node, self._engines, self._peers = node, engines, peers
        self._tasks: set[asyncio.Task[None]] = set()
        engines.subscribe(self._changed)

    def _changed(self, role: str) -> None:
        body = EngineRoom(role=role, room=self._engines.room(role), version=self._engines.version)
        for index in set(self._node.placement.trainer_nodes) - {self._node.index}:
            task = asyncio.get_running_loop().create_task(self._tell(index, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell(self, index: int, body: EngineRoom) -> None:
        with contextlib.suppress(YattError):  # the leader handles lost nodes
            await self._peers.request(index, body, self._node.config.launch.phase_timeout_s)
