"""Which server gets which call, and what a server's death costs: pure, for engines and for reward processes.

Calls wait here, not at servers, until one of their pool has room (late binding). Calls of one group go to one
server while it has room, so that an engine computes a shared prompt once. Otherwise the least loaded server
is taken, counting what it has to do for others.

A server that dies fails the calls in it, and one of them may be why. Each gets one *suspicion* and is asked
again; calls with `SUSPECT` suspicions or more never share a server. So a call that kills its server meets
each other call at most `SUSPECT` times, and cannot use up the others' patience. A call with more than
`patience` suspicions is over. Where many calls may be poison (reward functions, which users write), a suspect
has its server to itself: else it would be blamed for each poison that is new to its server.

Holds no clock and does no I/O; the same calls in the same order give the same answers.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field

FEW_SERVERS = 32
"""Up to so many servers are all looked at; of more, a few drawn ones."""

DRAWN = 8

SUSPECT = 2
"""Suspicions from which a call shares its server with no other such call. One death alone isolates nobody:
an ordinary crash of a full server must not make its calls run one by one."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Send this call to this server now."""

    key: str
    server: str


@dataclass(slots=True)
class _Call:
    pool: str
    group: str
    suspicion: int = 0
    server: str = ""
    """Where it runs; empty while it waits."""


@dataclass(slots=True)
class _Server:
    pool: str
    room: int
    elsewhere: int = 0
    running: dict[str, None] = field(default_factory=dict)
    counted: int = 0
    """Free places, as its pool counts them."""

    @property
    def free(self) -> int:
        return max(0, self.room - len(self.running))

    @property
    def load(self) -> float:
        return (len(self.running) + self.elsewhere) / self.room


class _Room:
    """Free places of one pool, and the servers that have some: updated and drawn from at a cost that does not
    grow with the servers."""

    def __init__(self) -> None:
        self.free = 0
        self.names: list[str] = []
        self._at: dict[str, int] = {}

    def count(self, name: str, before: int, now: int) -> None:
        """A server has `now` free places, and had `before`."""
        self.free += now - before
        if now and name not in self._at:
            self._at[name] = len(self.names)
            self.names.append(name)
        elif not now and name in self._at:
            at, last = self._at.pop(name), self.names.pop()
            if last != name:
                self.names[at] = last
                self._at[last] = at


class Dispatch:
    """Calls and servers of one process.

    Args:
        patience: suspicions that a call may gather and still be asked again.
        near: servers preferred among equally loaded ones.
        salt: makes two processes choose differently among equals.
        isolates: suspects share their server with no call at all. While one waits for that, none of its pool
            is bound, so that a server empties.
    """

    def __init__(
        self, *, patience: int, near: frozenset[str] = frozenset(), salt: str = "", isolates: bool = False
    ) -> None:
        self._isolates = isolates
        self._patience, self._near, self._draw = patience, near, random.Random(salt)
        self._calls: dict[str, _Call] = {}
        self._servers: dict[str, _Server] = {}
        self._names: dict[str, list[str]] = {}  # servers by pool
        self._rooms: dict[str, _Room] = {}  # by pool
        self._waiting: dict[str, OrderedDict[str, None]] = {}
        self._homes: dict[tuple[str, str], str] = {}
        self._living: dict[tuple[str, str], int] = {}

    # ---- servers --------------------------------------------------------------------------------

    def serve(self, server: str, pool: str, room: int, elsewhere: int = 0) -> None:
        """A server takes up to `room` calls, or that has changed; `elsewhere`: what others asked of it."""
        if server not in self._servers:
            self._servers[server] = _Server(pool, room)
            self._names.setdefault(pool, []).append(server)
        known = self._servers[server]
        known.room, known.elsewhere = room, elsewhere
        self._count(server)

    def has_servers(self, pool: str) -> bool:
        """Whether any server is there, full or not."""
        return bool(self._names.get(pool))

    def leave(self, server: str) -> list[str]:
        """A server takes no calls any more and is not to blame (asleep, lost node): its calls wait again."""
        gone = self._servers.pop(server, None)
        if gone is None:
            return []
        self._names[gone.pool].remove(server)
        self._room(gone.pool).count(server, gone.counted, 0)
        for key in gone.running:
            self._wait_again(key)
        return list(gone.running)

    def died(self, server: str) -> list[str]:
        """A server's process has ended: its calls wait again; gives those that are over."""
        return [key for key in self.leave(server) if not self.suspect(key)]

    # ---- calls ----------------------------------------------------------------------------------

    def submit(self, key: str, pool: str, group: str = "", suspicion: int = 0) -> None:
        """A new call; its key is unique among those under way."""
        assert key not in self._calls, f"call {key} is under way already"
        self._calls[key] = _Call(pool, group, suspicion)
        self._waiting.setdefault(pool, OrderedDict())[key] = None
        self._living[pool, group] = self._living.get((pool, group), 0) + 1

    def done(self, key: str) -> None:
        """A call was answered or withdrawn."""
        call = self._calls.pop(key, None)
        if call is None:
            return
        self._waiting[call.pool].pop(key, None)
        self._free(key, call.server)
        place = call.pool, call.group
        self._living[place] -= 1
        if not self._living[place]:
            del self._living[place]
            self._homes.pop(place, None)

    def withdraw(self, key: str) -> bool:
        """Takes back a call that still waits; False if it runs, or is not known."""
        if key not in self._calls or self._calls[key].server:
            return False
        self.done(key)
        return True

    def bounce(self, key: str) -> None:
        """A call came back unanswered through no fault of its own: it waits again, before all others."""
        if key in self._calls:
            self._wait_again(key)

    def suspect(self, key: str) -> bool:
        """A call's server died, or gave it up, because of it perhaps. False: it is over, and forgotten."""
        call = self._calls.get(key)
        if call is None:
            return True
        call.suspicion += 1
        if call.suspicion > self._patience:
            self.done(key)
            return False
        self._wait_again(key)
        return True

    def suspicion(self, key: str) -> int:
        """How often a call was blamed so far."""
        return self._calls[key].suspicion

    def keys(self, server: str) -> list[str]:
        """The calls that run in a server."""
        return list(self._servers[server].running) if server in self._servers else []

    def assign(self) -> list[Assignment]:
        """Binds waiting calls to servers with room, oldest first."""
        found: list[Assignment] = []
        for pool, waiting in self._waiting.items():
            room = self._room(pool)
            passed_over: list[str] = []
            while waiting and room.free:
                key = next(iter(waiting))
                if server := self._choose(key):
                    self._bind(key, server)
                    found.append(Assignment(key, server))
                else:  # a suspect, or among suspects: no server with room may take it
                    passed_over.append(key)
                    del waiting[key]
                    if self._isolates:
                        break
            for key in reversed(passed_over):
                waiting[key] = None
                waiting.move_to_end(key, last=False)
        return found

    # ---- inside ---------------------------------------------------------------------------------

    def _wait_again(self, key: str) -> None:
        call = self._calls[key]
        self._free(key, call.server)
        call.server = ""
        waiting = self._waiting[call.pool]
        waiting[key] = None
        waiting.move_to_end(key, last=False)

    def _bind(self, key: str, server: str) -> None:
        call = self._calls[key]
        call.server = server
        del self._waiting[call.pool][key]
        self._servers[server].running[key] = None
        self._count(server)
        if call.group:
            self._homes.setdefault((call.pool, call.group), server)

    def _free(self, key: str, server: str) -> None:
        """A call is in this server no more."""
        if server in self._servers:
            self._servers[server].running.pop(key, None)
            self._count(server)

    def _count(self, server: str) -> None:
        """Its free places have changed."""
        known = self._servers[server]
        before, known.counted = known.counted, known.free
        self._room(known.pool).count(server, before, known.counted)

    def _room(self, pool: str) -> _Room:
        return self._rooms.setdefault(pool, _Room())

    def _takes(self, server: str, call: _Call) -> bool:
        """Whether a server may get this call now: it has room, and no second suspect."""
        known = self._servers.get(server)
        if known is None or not known.free:
            return False
        if self._isolates:
            return not known.running or not (call.suspicion >= SUSPECT or self._has_suspect(known))
        if call.suspicion < SUSPECT:
            return True
        return not any(self._calls[key].suspicion >= SUSPECT for key in known.running)

    def _has_suspect(self, server: _Server) -> bool:
        """Where suspects are isolated, one that runs is alone."""
        return len(server.running) == 1 and self._calls[next(iter(server.running))].suspicion >= SUSPECT

    def _choose(self, key: str) -> str:
        """The server for a call, empty if none takes it now."""
        call = self._calls[key]
        home = self._homes.get((call.pool, call.group), "")
        if home and self._takes(home, call):
            return home
        names = self._names[call.pool]
        roomy = names if len(names) <= FEW_SERVERS else self._rooms[call.pool].names
        drawn = roomy if len(roomy) <= FEW_SERVERS else self._draw.sample(roomy, DRAWN)
        open_ = [name for name in drawn if self._takes(name, call)]
        if not open_ and len(drawn) < len(roomy):  # each of those drawn has a suspect, and so is the call
            open_ = [name for name in roomy if self._takes(name, call)]
        if not open_:
            return ""
        server = min(
            open_,
            key=lambda name: (self._servers[name].load, name not in self._near, self._draw.random()),
        )
        if home not in self._servers:
            self._homes.pop((call.pool, call.group), None)  # its home is gone: this is the new one
        return server
