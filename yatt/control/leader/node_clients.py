"""The leader's way to every node: over the wire to the others, straight to its own controller.

A node that is lost is left out: it is not asked, and an order to many is answered by those that are left.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from yatt.adapters.deadline import while_moving
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.errors import EXIT_FAILED, DeadlineExceeded, WorkerFailed
from yatt.records import message as m
from yatt.records.cluster import PeerLost, Quit

A = TypeVar("A", bound=m.Message)
Handle = Callable[[str, m.Message], Awaitable[m.Message | None]]


class NodeClients:
    """Asks nodes.

    Args:
        own: the leader's own controller.
        progress: of the leader's own workers.
        peers: lines to the others.
        gave_up: called with (node, why) when a node that only runs engines fails at an order.
    """

    def __init__(
        self, node: Node, own: Handle, peers: Peers, gave_up: Callable[[int, str], None],
        progress: Callable[[], int],
    ) -> None:  # fmt: skip
        self._node, self._own, self._peers, self._gave_up = node, own, peers, gave_up
        self._progress = progress

    async def ask(self, index: int, body: m.Order[A], deadline_s: float | None = None) -> A:
        """One node's answer.

        Raises:
            WorkerFailed: the node is lost, or could not do it; `exit_code` is what the attempt should
                end with.
            DeadlineExceeded: nothing moved there for so long.
        """
        limit_s = deadline_s or self._node.config.launch.phase_timeout_s
        if index == self._node.index:
            answer = await self._ask_own(body, limit_s)
        else:
            answer = await self._peers.request(index, body, limit_s)
        return m.unless_failed(answer, f"node{index}")

    async def _ask_own(self, body: m.Order[A], limit_s: float) -> A | m.Failed:
        name = self._node.name
        try:
            return m.as_answer(body, await while_moving(self._own(name, body), limit_s, self._progress), name)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._node.name} did not answer {type(body).__name__} within {limit_s:g} s"
            ) from None

    async def ask_each_trainer_node(self, bodies: Sequence[m.Order[A]]) -> list[A]:
        """Each owner's answer to an order of its own, by node index."""
        return await self.ask_nodes(dict(zip(self._node.placement.trainer_nodes, bodies, strict=True)))

    async def ask_trainer_nodes(self, body: m.Order[A]) -> list[A]:
        """Every owner's answer to the same order, by node index."""
        return await self.ask_nodes(dict.fromkeys(self._node.placement.trainer_nodes, body))

    async def ask_all(self, body: m.Order[A], deadline_s: float | None = None) -> list[A]:
        """The answers of all nodes that are there to the same order, by node index."""
        return await self.ask_nodes(dict.fromkeys(sorted(self._node.present), body), deadline_s)

    async def ask_nodes(self, orders: Mapping[int, m.Order[A]], deadline_s: float | None = None) -> list[A]:
        """The answers of those of these nodes that are there, and still are when they answer.

        A node that only runs engines and fails, other than by a user's mistake, is given up instead of the
        order.
        """
        asked = (self.ask_if_there(index, body, deadline_s) for index, body in orders.items())
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    async def ask_if_there(self, index: int, body: m.Order[A], deadline_s: float | None = None) -> A | None:
        """One of `ask_nodes`; None from a node that is lost, or is given up."""
        if self.is_lost(index):
            return None
        try:
            return await self.ask(index, body, deadline_s)
        except (WorkerFailed, DeadlineExceeded) as error:
            if self.is_lost(index):
                return None
            if index in self._node.placement.trainer_nodes or error.exit_code != EXIT_FAILED:
                raise
            self._gave_up(index, str(error))
            return None

    def is_lost(self, index: int) -> bool:
        """Whether this node is left out."""
        return index in self._peers.lost

    async def exclude(self, index: int, why: str) -> None:
        """Does without this node from now on. Tells the trainer nodes so, and tells it to end itself."""
        self._peers.exclude(index, why)
        await self._peers.tell(index, Quit(reason=f"this node {why}", exit_code=EXIT_FAILED))
        for owner in self._node.placement.trainer_nodes:
            if owner != self._node.index and not self.is_lost(owner):
                await self._peers.tell(owner, PeerLost(node=index, why=why))
