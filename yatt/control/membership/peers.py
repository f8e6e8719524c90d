"""Connections to the other controllers, the set of lost nodes, and newcomers (`yatt.core.phases.phases`).

A connection is opened when something is sent over it for the first time: of N nodes, only pairs that exchange
messages have one, not all N x N.

A lost node receives no more requests, and pending requests to it fail at once, so that no caller waits for a
timeout of a dead node. A newcomer receives only the leader's requests until it is admitted.
"""

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeVar

import msgspec

from yatt.adapters.net.channel import Channel
from yatt.core.requests.delivery import RequestWatch
from yatt.core.requests.peer_name import peer_name
from yatt.errors import WorkerFailed
from yatt.records import message as m
from yatt.records.codec import encode_body

A = TypeVar("A", bound=m.Message)
Dial = Callable[[str, str], Channel]
"""Opens a connection to the controller with this name at this address; '': where the rendezvous found it."""


Heard = Callable[[int], None]


class Standing(Enum):
    """What a process of a node's controller is to this one."""

    MEMBER = "member"
    NEWCOMER = "newcomer"
    UNKNOWN = "unknown"
    """Of a later life than any that is known."""

    OVER = "over"
    """Lost, or of a former life."""


class Lines:
    """Connections to processes of other controllers.

    Attributes:
        open: by name of the process.
        met: set when every node can be reached, or after `close`.
    """

    def __init__(self) -> None:
        self.open: dict[str, Channel] = {}
        self._dial: Dial | None = None
        self.met = asyncio.Event()
        self._watches: set[asyncio.Future[None]] = set()
        self._ended = asyncio.Event()
        self._end: BaseException | None = None

    def dial_with(self, dial: Dial) -> None:
        """Makes every node reachable; `dial` opens the connection to one."""
        self._dial = dial
        self.met.set()

    def dial(self, name: str, address: str) -> Channel | None:
        """Opens the connection to a process; returns None before the rendezvous is complete, and after
        `close`."""
        if self._dial is None:
            return None
        line = self.open[name] = self._dial(name, address)
        watch = asyncio.ensure_future(line.failure())
        self._watches.add(watch)
        watch.add_done_callback(self._line_ended)
        return line

    def fail(self, index: int, life: int, why: str) -> None:
        """Ends every request to a process."""
        name = peer_name(index, life)
        if name in self.open:
            self.open[name].fail_waiting(name, WorkerFailed(f"{name} {why}"))

    def close_one(self, index: int, life: int) -> None:
        """Closes the connection to a process that is over."""
        line = self.open.pop(peer_name(index, life), None)
        if line is None:
            return
        closing = asyncio.ensure_future(line.close())
        self._watches.add(closing)
        closing.add_done_callback(self._watches.discard)

    def _line_ended(self, watch: "asyncio.Future[None]") -> None:
        self._watches.discard(watch)
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._end = error
            self._ended.set()

    async def close(self) -> None:
        """Closes all connections; none is opened any more."""
        self._dial = None
        self.met.set()
        for watch in self._watches:
            watch.cancel()
        for line in self.open.values():
            await line.close()

    async def failure(self) -> None:
        """Never returns; raises the error that ended a connection (StaleAttempt: a newer attempt exists)."""
        await self._ended.wait()
        assert self._end is not None, "kept before the event is set"
        raise self._end


class Peers:
    """The other controllers, by node index.

    Args:
        lost: nodes that take no part from the start.
    """

    def __init__(self, lost: frozenset[int] = frozenset()) -> None:
        self.lines = Lines()
        self._on_lost: list[Heard] = []
        self._on_invited: list[Heard] = []
        self._on_admitted: list[Heard] = []
        self._lost = dict.fromkeys(lost, "takes no part in this attempt")
        self.lost = frozenset(self._lost)
        """Nodes that are lost or absent; one with a newcomer too, until it is admitted."""
        self.joined: dict[int, tuple[int, str]] = {}
        """Life and address of each node that was admitted later."""
        self.newcomers: dict[int, tuple[int, str]] = {}
        """Life and address of newcomers; only the leader has some."""
        self._over: dict[int, int] = {}
        """The highest life of each node that is over."""
        self._changed = set(lost)
        """Nodes that were ever lost, invited or admitted. Every message asks for its sender's standing, and
        all other nodes are members in their first life."""

    def subscribe(
        self, *, lost: Heard | None = None, invited: Heard | None = None, admitted: Heard | None = None
    ) -> None:
        """Registers functions, called with the index of each node that is excluded, of each newcomer, and of
        each newcomer that is admitted."""
        self._on_lost += [lost] if lost else []
        self._on_invited += [invited] if invited else []
        self._on_admitted += [admitted] if admitted else []

    @staticmethod
    def is_follower(sender: str) -> bool:
        """Whether a socket identity is that of a node other than the leader."""
        return sender.startswith("node") and sender != "node0"

    # ---- who takes part -------------------------------------------------------------------------

    def life(self, index: int) -> int:
        """Returns the life of the node's process that takes part, or did last."""
        return self.joined.get(index, (1, ""))[0]

    def newest_life(self, index: int) -> int:
        """Returns the life of the newest process that is known: of the newcomer, if there is one."""
        return self.newcomers.get(index, (self.life(index), ""))[0] if index in self._changed else 1

    def standing(self, index: int, life: int) -> Standing:
        """Returns what this process of a node's controller is here."""
        if life == 1 and index not in self._changed:
            return Standing.MEMBER
        if life <= self._over.get(index, 0):
            return Standing.OVER
        if life > self.newest_life(index):
            return Standing.UNKNOWN
        if index in self.newcomers and life == self.newest_life(index):
            return Standing.NEWCOMER
        return Standing.MEMBER if life == self.life(index) and index not in self._lost else Standing.OVER

    def invite(self, index: int, life: int, address: str) -> None:
        """Makes a newcomer of a lost node reachable with `request_newcomer`; it replaces a former one."""
        self._changed.add(index)
        self._forget_newcomer(index, "ended, and was started again")
        self.newcomers[index] = life, address
        for invited in self._on_invited:
            invited(index)

    def admit(self, index: int, life: int, address: str) -> None:
        """Makes this process the node's controller; its former one is excluded, if it was not before."""
        if life <= max(self.life(index), self._over.get(index, 0)):
            return  # late: it is lost already, or a later one takes part
        self._changed.add(index)
        if index not in self._lost:
            self.exclude(index, "ended, and was started again", self.life(index))
        self.lines.close_one(index, self.life(index))
        self.newcomers.pop(index, None)
        self.joined[index] = life, address
        self._lost.pop(index, None)
        self.lost = frozenset(self._lost)
        for admitted in self._on_admitted:
            admitted(index)

    def exclude(self, index: int, why: str, life: int = 1) -> None:
        """Excludes a process of a node: ends every request to it, and sends it no more requests."""
        self._changed.add(index)
        self._over[index] = max(life, self._over.get(index, 0))
        if life == self.newcomers.get(index, (0, ""))[0]:
            self._forget_newcomer(index, why)
            return
        if life != self.life(index):
            return
        self._lost.setdefault(index, why)
        self.lost = frozenset(self._lost)
        self.lines.fail(index, life, why)
        for lost in self._on_lost:
            lost(index)

    def _forget_newcomer(self, index: int, why: str) -> None:
        life, _ = self.newcomers.pop(index, (0, ""))
        if life:
            self._over[index] = max(life, self._over.get(index, 0))
            self.lines.fail(index, life, why)
            self.lines.close_one(index, life)

    # ---- messages -------------------------------------------------------------------------------

    async def request(
        self, index: int, body: m.Order[A], deadline_s: float, moved: Callable[[], None] | None = None
    ) -> A | m.Failed:
        """Returns one node's answer. `moved` is called whenever that node reports progress.

        Raises:
            WorkerFailed: the node is lost, or was lost meanwhile.
            DeadlineExceeded: no answer in time.
        """
        if index in self._lost:
            raise WorkerFailed(f"node{index} {self._lost[index]}")
        return await self._request(index, self.life(index), body, deadline_s, moved)

    async def request_newcomer(
        self, index: int, life: int, body: m.Order[A], deadline_s: float
    ) -> A | m.Failed:
        """Returns a newcomer's answer, also after it was admitted. Raises as `request` does."""
        if life not in (self.newest_life(index), self.life(index)):
            raise WorkerFailed(f"{peer_name(index, life)} is over")
        return await self._request(index, life, body, deadline_s, None)

    async def _request(
        self, index: int, life: int, body: m.Order[A], deadline_s: float, moved: Callable[[], None] | None
    ) -> A | m.Failed:
        name = peer_name(index, life)
        line = self._line(index, life)
        assert line is not None, "requests begin after the controllers have met"
        return await line.request(name, body, deadline_s, watch=RequestWatch(moved=moved))

    async def tell(self, index: int, body: m.Message, life: int = 0) -> None:
        """Sends a message without an answer; also to a lost node, which may only have been suspended.

        `life` chooses the process; 0: the newest that is known.
        """
        self._send(index, life or self.newest_life(index), body)

    def tell_each(self, indices: Iterable[int], body: m.Message) -> None:
        """Does the same as `tell` for several nodes, and encodes the message once."""
        encoded = encode_body(body)
        for index in indices:
            self._send(index, self.newest_life(index), encoded)

    def _send(self, index: int, life: int, body: m.Message | msgspec.Raw) -> None:
        line = self._line(index, life)
        if line is not None:
            line.send(peer_name(index, life), body)

    def _line(self, index: int, life: int) -> Channel | None:
        """Returns the connection to a process; None if there can be none now, and to a former life."""
        name = peer_name(index, life)
        if name in self.lines.open:
            return self.lines.open[name]
        address = self._address(index, life)
        return self.lines.dial(name, address) if life == 1 or address else None

    def _address(self, index: int, life: int) -> str:
        known = (self.joined.get(index), self.newcomers.get(index))
        return next((each[1] for each in known if each is not None and each[0] == life), "")
