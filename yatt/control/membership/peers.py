"""Connections to the other controllers, and the set of lost nodes.

A connection is opened when something is sent over it for the first time: of N nodes, only pairs that exchange
messages have one, not all N x N.

A lost node receives no more requests, and pending requests to it fail at once, so that no caller waits for a
timeout of a dead node.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from yatt.adapters.channel import Channel, RequestWatch
from yatt.errors import WorkerFailed
from yatt.records import message as m

A = TypeVar("A", bound=m.Message)


class Peers:
    """The other controllers, by node index.

    Args:
        lost: nodes that take no part from the start.
    """

    def __init__(self, lost: frozenset[int] = frozenset()) -> None:
        self.lines: dict[int, Channel] = {}
        self._dial: Callable[[int], Channel] | None = None
        self._subscribers: list[Callable[[int], None]] = []
        self.met = asyncio.Event()
        """Set when every node can be reached, or after `close`."""
        self._watches: set[asyncio.Future[None]] = set()
        self._ended = asyncio.Event()
        self._end: BaseException | None = None
        self._lost = dict.fromkeys(lost, "takes no part in this attempt")
        self.lost = frozenset(self._lost)
        """Nodes that are lost or absent."""

    def dial_with(self, dial: Callable[[int], Channel]) -> None:
        """Makes every node reachable; `dial` opens the connection to one."""
        self._dial = dial
        self.met.set()

    def subscribe(self, lost: Callable[[int], None]) -> None:
        """Registers a function, called with the index of each excluded node."""
        self._subscribers.append(lost)

    @staticmethod
    def index_of(sender: str, num_nodes: int) -> int | None:
        """Returns the index of the node with this socket identity; None if it is no node of this run."""
        digits = sender.removeprefix("node")
        if sender == digits or not (digits.isascii() and digits.isdecimal()) or len(digits) > 9:
            return None
        index = int(digits)
        return index if index < num_nodes and str(index) == digits else None

    @staticmethod
    def is_follower(sender: str) -> bool:
        """Whether a socket identity is that of a node other than the leader."""
        return sender.startswith("node") and sender != "node0"

    async def close(self) -> None:
        """Closes all connections; none is opened any more."""
        self._dial = None
        self.met.set()
        for watch in self._watches:
            watch.cancel()
        for line in self.lines.values():
            await line.close()

    async def failure(self) -> None:
        """Never returns; raises the error that ended a connection (StaleAttempt: a newer attempt exists)."""
        await self._ended.wait()
        assert self._end is not None, "kept before the event is set"
        raise self._end

    def exclude(self, index: int, why: str) -> None:
        """Excludes a node: ends every request to it, and sends it no more requests."""
        self._lost.setdefault(index, why)
        self.lost = frozenset(self._lost)
        if index in self.lines:
            self.lines[index].fail_waiting(f"node{index}", self._error(index))
        for lost in self._subscribers:
            lost(index)

    async def request(
        self, index: int, body: m.Order[A], deadline_s: float, moved: Callable[[], None] | None = None
    ) -> A | m.Failed:
        """Returns one node's answer. `moved` is called whenever that node reports progress.

        Raises:
            WorkerFailed: the node is lost, or was lost meanwhile.
            DeadlineExceeded: no answer in time.
        """
        if index in self._lost:
            raise self._error(index)
        line = self._line(index)
        assert line is not None, "requests begin after the controllers have met"
        return await line.request(f"node{index}", body, deadline_s, watch=RequestWatch(moved=moved))

    async def tell(self, index: int, body: m.Message) -> None:
        """Sends a message without an answer; also to a lost node, which may only have been suspended."""
        line = self._line(index)
        if line is not None:
            await line.tell(f"node{index}", body)

    def _line(self, index: int) -> Channel | None:
        """Returns the connection to a node; None before the rendezvous is complete, and after `close`."""
        if index not in self.lines and self._dial is not None:
            line = self.lines[index] = self._dial(index)
            watch = asyncio.ensure_future(line.failure())
            self._watches.add(watch)
            watch.add_done_callback(self._line_ended)
        return self.lines.get(index)

    def _line_ended(self, watch: "asyncio.Future[None]") -> None:
        self._watches.discard(watch)
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._end = error
            self._ended.set()

    def _error(self, index: int) -> WorkerFailed:
        return WorkerFailed(f"node{index} {self._lost[index]}")
