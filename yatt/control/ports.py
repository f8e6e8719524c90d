"""The leader's way to every node: over the wire to the others, straight to its own controller."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from yatt.adapters.wire import Channel
from yatt.control.node import Node
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import message as m
from yatt.records.cluster import OrderFailed

Handle = Callable[[str, m.Message], Awaitable[m.Message | None]]


class Ports:
    """Asks nodes.

    Args:
        own: the leader's own controller.
        peers: lines to the others, by node index.
    """

    def __init__(self, node: Node, own: Handle, peers: dict[int, Channel]) -> None:
        self._node, self._own, self._peers = node, own, peers

    async def ask(self, index: int, body: m.Message, deadline_s: float | None = None) -> m.Message:
        """One node's answer.

        Raises:
            WorkerFailed: the node could not do it; `exit_code` is what the attempt should end with.
            DeadlineExceeded: no answer in time.
        """
        limit_s = deadline_s or self._node.config.launch.phase_timeout_s
        if index == self._node.index:
            answer = await self._ask_own(body, limit_s)
        else:
            answer = await self._peers[index].request(f"node{index}", body, limit_s)
        if isinstance(answer, OrderFailed):
            failure = WorkerFailed(f"node{index}: {answer.error}")
            failure.exit_code = answer.exit_code
            raise failure
        assert answer is not None, f"{type(body).__name__} has an answer"
        return answer

    async def _ask_own(self, body: m.Message, limit_s: float) -> m.Message | None:
        try:
            return await asyncio.wait_for(self._own(self._node.name, body), limit_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._node.name} did not answer {type(body).__name__} within {limit_s:g} s"
            ) from None

    async def ask_each(self, bodies: Sequence[m.Message]) -> list[m.Message]:
        """Each node's answer to an order of its own, by node index."""
        return list(await asyncio.gather(*(self.ask(index, body) for index, body in enumerate(bodies))))

    async def ask_all(self, body: m.Message, deadline_s: float | None = None) -> list[m.Message]:
        """Every node's answer to the same order, by node index."""
        nodes = range(self._node.config.launch.nodes)
        return list(await asyncio.gather(*(self.ask(index, body, deadline_s) for index in nodes)))
