"""Messages from other controllers: signs of life, event lines and failures here, orders by the controller."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from yatt.adapters.channel import Answer
from yatt.adapters.writer import BackgroundWriter
from yatt.control.leader.inbox import Inbox
from yatt.control.membership.event_sender import EventSender
from yatt.control.membership.liveness import Liveness
from yatt.control.membership.peers import Peers
from yatt.control.node import Node
from yatt.errors import EXIT_FAILED
from yatt.records import cluster as c, message as m

Handle = Callable[[str, m.Message], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMessages:
    """Takes what other nodes send.

    Attributes:
        inbox: the coordinator's, on the leader.
        controller: carries out orders. Reading the data and the store takes long, so it is there later.
    """

    node: Node
    peers: Peers
    liveness: Liveness
    writer: BackgroundWriter
    sender: EventSender
    inbox: Inbox | None
    controller: "asyncio.Future[Handle]"

    def handle(self, sender: str, body: m.Message) -> Answer | Awaitable[Answer]:
        """Takes at once what every node sends every second; all else costs a task."""
        index = self.peers.index_of(sender, self.node.config.launch.nodes)
        if index is None:
            return m.Failed(error=f"{sender!r} is no node of this run, and is not heard")
        if index in self.peers.lost:
            return self._refuse(index, body)
        self.liveness.heard(index)
        match body:
            case c.Alive():
                return None
            case c.EventLines():
                self.writer.append(self.node.paths.events, body.lines.decode(errors="replace"))
                return None
            case c.FailureReport():
                self._failed(index, body)
                return m.Done()
        return self._carry_out(sender, body)

    def _failed(self, index: int, report: c.FailureReport) -> None:
        """What costs a trainer node the attempt costs an engine node its place."""
        if self.inbox is None:
            return
        if index not in self.node.placement.trainer_nodes and report.exit_code == EXIT_FAILED:
            self.inbox.gave_up(index, report.error)
        else:
            error = f"node{index}: {report.error}"
            self.inbox.fail(error, report.exit_code, is_symptom=report.is_symptom)

    async def _refuse(self, index: int, body: m.Message) -> None:
        """Tells a node that was declared lost, and only stood still, that it has to end."""
        if self.node.is_leader and isinstance(body, c.Alive):
            reason = "the leader goes on without this node: it was silent too long"
            await self.peers.tell(index, c.Quit(reason=reason, exit_code=EXIT_FAILED))

    async def _carry_out(self, sender: str, body: m.Message) -> Answer:
        if isinstance(body, c.Quit):
            await self.sender.flush()  # the leader takes no more events once it has the answer
        limit_s = self.node.config.launch.phase_timeout_s
        try:
            handle = await asyncio.wait_for(asyncio.shield(self.controller), limit_s)
        except TimeoutError:
            return m.Failed(error=f"{self.node.name} has not read its data within {limit_s:g} s")
        return await handle(sender, body)
