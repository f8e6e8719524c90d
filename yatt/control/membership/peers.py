"""Lines to the other controllers, and which of them are lost.

A line is opened when something is sent over it for the first time: of N nodes only pairs that talk to each
other have one, not all N x N.

A node that is lost is asked nothing any more, and what was asked of it fails at once: nobody waits out
a timeout for the dead.
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
        """Set once every node can be reached, or none will be."""
        self._watches: set[asyncio.Future[None]] = set()
        self._ended = asyncio.Event()
        self._end: BaseException | None = None
        self._lost = dict.fromkeys(lost, "takes no part in this attempt")
        self.lost = frozenset(self._lost)
        """Nodes that are not there any more, or never were."""

    def dial_with(self, dial: Callable[[int], Channel]) -> None:
        """From now on every node can be reached; `dial` opens the line to one."""
        self._dial = dial
        self.met.set()

    def subscribe(self, lost: Callable[[int], None]) -> None:
        """`lost` is called with the index of each node that is excluded."""
        self._subscribers.append(lost)

    @staticmethod
    def index_of(sender: str, num_nodes: int) -> int | None:
        """Which node a name on the wire is; None if it is no node of this run."""
        digits = sender.removeprefix("node")
        if sender == digits or not (digits.isascii() and digits.isdecimal()) or len(digits) > 9:
            return None
        index = int(digits)
        return index if index < num_nodes and str(index) == digits else None

    @staticmethod
    def is_follower(sender: str) -> bool:
        """Whether a name on the wire is a node's, other than the leader's."""
        return sender.startswith("node") and sender != "node0"

    async def close(self) -> None:
        """Close all lines; none is opened any more."""
        self._dial = None
        self.met.set()
        for watch in self._watches:
            watch.cancel()
        for line in self.lines.values():
            await line.close()

    async def failure(self) -> None:
        """Never returns; raises what ended the reading of a connection (StaleAttempt: a newer one exists)."""
        await self._ended.wait()
        assert self._end is not None, "kept before the event is set"
        raise self._end

    def exclude(self, index: int, why: str) -> None:
        """Do without a node: end every request to it, and ask it nothing any more."""
        self._lost.setdefault(index, why)
        self.lost = frozenset(self._lost)
        if index in self.lines:
            self.lines[index].fail_waiting(f"node{index}", self._error(index))
        for lost in self._subscribers:
            lost(index)

    async def request(
        self, index: int, body: m.Order[A], deadline_s: float, moved: Callable[[], None] | None = None
    ) -> A | m.Failed:
        """One node's answer. `moved` is called whenever that node says that it got on meanwhile.

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
        """Send without an answer, to a lost node too: it may only have stood still."""
        line = self._line(index)
        if line is not None:
            await line.tell(f"node{index}", body)

    def _line(self, index: int) -> Channel | None:
        """The line to a node; None before the controllers have met, and after `close`."""
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
