"""Sends the leader's orders to every node: by message to the others, directly to its own controller.

A lost node is left out: it receives no order, and an order to many nodes returns the answers of the rest.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from yatt.adapters.net.deadline import while_moving
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.core.attempts.lives import is_own_mistake
from yatt.errors import EXIT_EXCLUDED, EXIT_FAILED, DeadlineExceeded, WorkerFailed
from yatt.records import message as m
from yatt.records.cluster import GrantSlabs, PeerJoined, PeerLost, Quit, Roster, StartWorkers

A = TypeVar("A", bound=m.Message)
Handle = Callable[[str, m.Message], Awaitable[m.Message | None]]


class NodeClients:
    """Sends orders to nodes and waits for answers.

    Args:
        own: the handler of the leader's own controller.
        progress: returns the progress of the leader's own workers.
        peers: connections to the other controllers.
        gave_up: called with (node, life, why) when a node that only runs engines fails at an order.
    """

    def __init__(
        self,
        node: Node,
        own: Handle,
        peers: Peers,
        gave_up: Callable[[int, int, str], None],
        progress: Callable[[], int],
    ) -> None:
        self._node, self._own, self._peers, self._gave_up = node, own, peers, gave_up
        self._progress, self._num_nodes = progress, node.config.launch.nodes
        self.judges: dict[str, str] = {}
        """Folders of refreshed GenRMs, which newcomers are told."""

    async def ask(self, index: int, body: m.Order[A], deadline_s: float | None = None) -> A:
        """Returns one node's answer.

        Raises:
            WorkerFailed: the node is lost, or failed; `exit_code` is the one to end the attempt with.
            DeadlineExceeded: the node made no progress for that long.
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
        """Returns each trainer node's answer to an order of its own, by node index."""
        return await self.ask_nodes(dict(zip(self._node.placement.trainer_nodes, bodies, strict=True)))

    async def ask_trainer_nodes(self, body: m.Order[A]) -> list[A]:
        """Returns every trainer node's answer to the same order, by node index."""
        return await self.ask_nodes(dict.fromkeys(self._node.placement.trainer_nodes, body))

    async def ask_all(self, body: m.Order[A], deadline_s: float | None = None) -> list[A]:
        """Returns the answers of all nodes that take part to the same order, by node index."""
        return await self.ask_nodes(dict.fromkeys(range(self._num_nodes), body), deadline_s)

    async def ask_nodes(self, orders: Mapping[int, m.Order[A]], deadline_s: float | None = None) -> list[A]:
        """Returns the answers of those of these nodes that are not lost before they answer.

        If an engine node fails, other than by a user's mistake, the node is excluded and the order continues.
        """
        asked = (self.ask_if_there(index, body, deadline_s) for index, body in orders.items())
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    async def ask_if_there(self, index: int, body: m.Order[A], deadline_s: float | None = None) -> A | None:
        """Sends one order of `ask_nodes`; returns None if the node is lost or excluded."""
        if self.is_lost(index):
            return None
        life = self._peers.life(index)
        try:
            return await self.ask(index, body, deadline_s)
        except (WorkerFailed, DeadlineExceeded) as error:
            if self.is_lost(index) or self._peers.life(index) != life:
                return None
            is_nodes_own = error.exit_code == EXIT_FAILED or is_own_mistake(life, error.exit_code)
            if index in self._node.placement.trainer_nodes or not is_nodes_own:
                raise
            self._gave_up(index, life, str(error))
            return None

    def is_lost(self, index: int) -> bool:
        """Whether this node is left out."""
        return index in self._peers.lost

    async def quit(self, reason: str, exit_code: int, deadline_s: float) -> None:
        """Orders every node to quit, newcomers too, and waits for those that take part."""
        for index in self._peers.newcomers:
            await self._peers.tell(index, Quit(reason=reason, exit_code=exit_code))
        await self.ask_all(Quit(reason=reason, exit_code=exit_code), deadline_s)

    # ---- nodes that leave and join ----------------------------------------------------------------

    async def exclude(self, index: int, life: int, why: str) -> None:
        """Excludes a process of a node from now on. Informs the other nodes, and orders it to end itself."""
        is_newcomer = life == self._peers.newcomers.get(index, (0, ""))[0]
        await self._peers.tell(index, Quit(reason=f"this node {why}", exit_code=EXIT_EXCLUDED), life)
        self._peers.exclude(index, why, life)
        for other in () if is_newcomer else range(self._num_nodes):
            if other != self._node.index and not self.is_lost(other):
                await self._peers.tell(other, PeerLost(node=index, life=life, why=why))

    async def prepare(self, index: int, life: int, holders: Sequence[tuple[int, str]]) -> None:
        """Makes a newcomer start its workers and grant its slabs.

        Raises:
            WorkerFailed: it failed, or is over.
            DeadlineExceeded: it made no progress for too long.
        """
        launch = self._node.config.launch
        limit_s = max(launch.start_timeout_s, launch.phase_timeout_s)
        for order in (StartWorkers(), GrantSlabs(holders=tuple(holders))):
            answer = await self._peers.request_newcomer(index, life, order, limit_s)
            m.unless_failed(answer, f"node{index}")

    def admit(self, index: int, life: int) -> None:
        """Makes a newcomer take part from now on; then `introduce` it."""
        _, address = self._peers.newcomers[index]
        self._peers.admit(index, life, address)

    async def introduce(self, index: int, life: int) -> None:
        """Tells the other nodes about a node that was admitted, and it about them.

        Raises:
            WorkerFailed, DeadlineExceeded: a trainer node failed. An engine node that fails is excluded.
        """
        joined = tuple(
            PeerJoined(node=n, life=its, address=at) for n, (its, at) in self._peers.joined.items()
        )
        mine = next((each for each in joined if (each.node, each.life) == (index, life)), None)
        if mine is None or self.is_lost(index):
            return  # lost meanwhile; a later life is introduced by itself
        roster = Roster(lost=tuple(sorted(self._peers.lost)), joined=joined, judges=self.judges)
        others = (other for other in range(self._num_nodes) if other not in (self._node.index, index))
        await self.ask_nodes({index: roster, **dict.fromkeys(others, mine)})
