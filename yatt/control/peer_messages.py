"""Handles messages of other controllers: keep-alive, event lines, failures; the controller handles orders."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from yatt.adapters.net.channel import Answer
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.slabs.node_loads import NodeLoads
from yatt.control.membership.event_sender import EventSender
from yatt.control.membership.liveness import Liveness
from yatt.control.membership.peers import Peers, Standing
from yatt.control.node import Node
from yatt.core.attempts.lives import is_own_mistake
from yatt.core.requests.peer_name import parsed_peer, peer_name
from yatt.errors import EXIT_EXCLUDED, EXIT_FAILED
from yatt.records import cluster as c, message as m

Handle = Callable[[str, m.Message], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMessages:
    """Handles messages of other nodes.

    Attributes:
        to_file: appends event lines to the run's file; the leader receives those of all nodes.
        inbox: the coordinator's inbox, on the leader.
        loads: collects what nodes report to the leader.
        controller: carries out orders; set later, since reading the data and the store takes long.
    """

    node: Node
    peers: Peers
    liveness: Liveness
    to_file: Callable[[str], None]
    sender: EventSender
    inbox: Inbox | None
    loads: NodeLoads
    controller: "asyncio.Future[Handle]"

    def handle(self, sender: str, body: m.Message) -> Answer | Awaitable[Answer]:
        """Handles frequent messages directly; all others start a task."""
        who = parsed_peer(sender, self.node.config.launch.nodes)
        if who is None:
            return m.Failed(error=f"{sender!r} is no node of this run, and is not heard")
        index, life = who
        standing = self.peers.standing(index, life)
        if isinstance(body, c.Knock):
            return self._knocked(index, life, body, standing)
        if standing not in (Standing.MEMBER, Standing.NEWCOMER):
            return self._refuse(index, life, body, standing)
        self.liveness.heard(index)
        match body:
            case c.Alive():
                self._alive(index, life, body, standing)
                return None
            case c.EventLines():
                self.to_file(body.lines.decode(errors="replace"))
                return None
            case c.FailureReport():
                self._failed(index, life, body)
                return m.Done()
            case _ if standing is Standing.NEWCOMER:
                return m.Failed(error=f"{sender} does not take part yet")
        return self._carry_out(sender, body)

    def _alive(self, index: int, life: int, body: c.Alive, standing: Standing) -> None:
        if standing is Standing.MEMBER:
            self.loads.put(index, life, body.load)

    def _knocked(self, index: int, life: int, knock: c.Knock, standing: Standing) -> m.Message:
        if self.inbox is None or index in self.node.placement.trainer_nodes or standing is Standing.OVER:
            return m.Failed(error=f"{peer_name(index, life)} cannot join this attempt")
        if standing is Standing.UNKNOWN:
            self.peers.invite(index, life, knock.address)
            self.inbox.knocked(index, life)
        return m.Done()

    def _failed(self, index: int, life: int, report: c.FailureReport) -> None:
        """Handles a failure: a trainer node's ends the attempt, an engine node's excludes only that node."""
        if self.inbox is None:
            return
        is_engine_node = index not in self.node.placement.trainer_nodes
        if is_engine_node and (report.exit_code == EXIT_FAILED or is_own_mistake(life, report.exit_code)):
            self.inbox.gave_up(index, life, report.error)
        else:
            error = f"node{index}: {report.error}"
            self.inbox.fail(error, report.exit_code, is_symptom=report.is_symptom)

    async def _refuse(self, index: int, life: int, body: m.Message, standing: Standing) -> Answer:
        """Orders a process to end that was declared lost but had only been suspended. One that is not known
        yet has to ask again."""
        if standing is Standing.UNKNOWN and isinstance(body, m.Order):
            return m.Failed(error=f"{peer_name(index, life)} is not known here yet")
        if self.node.is_leader and isinstance(body, c.Alive) and standing is Standing.OVER:
            reason = "the leader continues without this node: it was silent too long"
            await self.peers.tell(index, c.Quit(reason=reason, exit_code=EXIT_EXCLUDED), life)
        return None

    async def _carry_out(self, sender: str, body: m.Message) -> Answer:
        if isinstance(body, c.Quit):
            await self.sender.flush()  # the leader accepts no events after this answer
        if not self.controller.done():  # afterwards an order costs no timer
            limit_s = self.node.config.launch.phase_timeout_s
            await asyncio.wait({self.controller}, timeout=limit_s)
            if not self.controller.done():
                return m.Failed(error=f"{self.node.name} has not read its data within {limit_s:g} s")
        return await self.controller.result()(sender, body)
