"""Sends the events of a controller to the leader, several per message, since messages are costly."""

import asyncio

from yatt.control.membership.peers import Peers
from yatt.records.cluster import EventLines

GATHER_S = 0.05
"""Time for which an event waits for others. A controller that is killed loses its waiting events."""


class EventSender:
    """A sink for `EventLog`: call it with a line, in the event loop."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._lines: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None

    def __call__(self, line: str) -> None:
        """Sends this line soon."""
        self._lines.append(line.encode())
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        await asyncio.sleep(GATHER_S)
        await self._peers.lines.met.wait()
        self._sending = None
        await self.flush()

    async def flush(self) -> None:
        """Sends the waiting lines now."""
        lines, self._lines = self._lines, []
        if lines:
            await self._peers.tell(0, EventLines(lines=b"\n".join(lines)))

    async def close(self) -> None:
        """Sends the last lines."""
        if self._sending is not None:
            self._sending.cancel()
        await self.flush()
