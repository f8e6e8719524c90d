"""Assigns calls to servers and handles the death of a server, for engines and for reward processes. Pure.

Calls wait here, not at servers, until a server of their pool has room (late binding). Calls of one group go
to one server while it has room, so that an engine computes a shared prompt once. Otherwise the least loaded
server is chosen; its load includes calls of other processes.

When a server dies its calls fail, and one of them may be the cause. Each gets one *suspicion* and is assigned
again; calls with `SUSPECT` suspicions or more (*suspects*) never share a server. So a call that kills its
servers shares a server with each other call at most `SUSPECT` times, and cannot use up their patience. A call
with more than `patience` suspicions fails. Where many calls may kill a server (reward functions of the user),
a suspect has a server alone: otherwise it would be suspected for each new call that kills its server.

There is no clock and no I/O; the same calls in the same order give the same assignments.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field

FEW_SERVERS = 32
"""Up to this number of servers, all are compared; of more, `DRAWN` random ones."""

DRAWN = 8

SUSPECT = 2
"""Number of suspicions from which a call does not share a server with another such call. One death does not
isolate a call: an ordinary crash of a full server must not make its calls run one by one."""


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
    """The server that runs the call; empty while it waits."""


@dataclass(slots=True)
class _Server:
    pool: str
    room: int
    elsewhere: int = 0
    running: dict[str, None] = field(default_factory=dict)
    counted: int = 0
    """Number of free places that is counted in its pool."""

    @property
    def free(self) -> int:
        return max(0, self.room - len(self.running))

    @property
    def load(self) -> float:
        return (len(self.running) + self.elsewhere) / self.room


class _Pool:
    """The servers of one pool, its free places, and the servers that have some (`names`). The cost of updates
    and of random draws does not depend on the number of servers."""

    def __init__(self) -> None:
        self.servers: list[str] = []
        self.free = 0
        self.names: list[str] = []
        self._at: dict[str, int] = {}

    def count(self, name: str, before: int, now: int) -> None:
        """Records that a server has `now` free places instead of `before`."""
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
        patience: maximum number of suspicions of a call that is assigned again.
        near: servers preferred among equally loaded ones.
        salt: seed for random choices, so that two processes choose different servers.
        isolates: a suspect does not share its server with any call. While a suspect waits, no call of its
            pool is assigned, so that a server becomes empty.
    """

    def __init__(
        self, *, patience: int, near: frozenset[str] = frozenset(), salt: str = "", isolates: bool = False
    ) -> None:
        self._isolates = isolates
        self._patience, self._near, self._draw = patience, near, random.Random(salt)
        self._calls: dict[str, _Call] = {}
        self._servers: dict[str, _Server] = {}
        self._pools: dict[str, _Pool] = {}
        self._waiting: dict[str, OrderedDict[str, None]] = {}
        self._homes: dict[tuple[str, str], str] = {}
        self._living: dict[tuple[str, str], int] = {}

    # ---- servers --------------------------------------------------------------------------------

    def serve(self, server: str, pool: str, room: int, elsewhere: int = 0) -> None:
        """Adds or updates a server that takes `room` calls; `elsewhere`: its calls of other processes."""
        if server not in self._servers:
            self._servers[server] = _Server(pool, room)
            self._pool(pool).servers.append(server)
        known = self._servers[server]
        known.room, known.elsewhere = room, elsewhere
        self._count(server)

    def has_servers(self, pool: str) -> bool:
        """Whether the pool has any server, full or not."""
        return pool in self._pools and bool(self._pools[pool].servers)

    def leave(self, server: str) -> list[str]:
        """Removes a server without suspicion (asleep, lost node); returns its calls, which wait again."""
        gone = self._servers.pop(server, None)
        if gone is None:
            return []
        self._pools[gone.pool].servers.remove(server)
        self._pools[gone.pool].count(server, gone.counted, 0)
        for key in gone.running:
            self._wait_again(key)
        return list(gone.running)

    def died(self, server: str) -> list[str]:
        """Removes a server whose process has ended; its calls wait again. Returns those that fail."""
        return [key for key in self.leave(server) if not self.suspect(key)]

    # ---- calls ----------------------------------------------------------------------------------

    def num_waiting(self, pool: str) -> int:
        """Number of a pool's calls that wait for a server."""
        return len(self._waiting.get(pool, ()))

    def num_calls(self, pool: str) -> int:
        """Number of a pool's calls, waiting or running."""
        servers = self._pools[pool].servers if pool in self._pools else ()
        return self.num_waiting(pool) + sum(len(self._servers[name].running) for name in servers)

    def submit(self, key: str, pool: str, group: str = "", suspicion: int = 0) -> None:
        """Adds a call; its key is unique among the pending calls."""
        assert key not in self._calls, f"call {key} is under way already"
        self._calls[key] = _Call(pool, group, suspicion)
        self._waiting.setdefault(pool, OrderedDict())[key] = None
        self._living[pool, group] = self._living.get((pool, group), 0) + 1

    def done(self, key: str) -> None:
        """Removes a call that was answered or withdrawn."""
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
        """Removes a call that still waits; returns False if it runs or is unknown."""
        if key not in self._calls or self._calls[key].server:
            return False
        self.done(key)
        return True

    def bounce(self, key: str) -> None:
        """Puts an unanswered call without suspicion before all waiting calls."""
        if key in self._calls:
            self._wait_again(key)

    def suspect(self, key: str) -> bool:
        """Adds a suspicion to a call, which waits again; returns False if it fails and is removed."""
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
        """Returns the number of suspicions of a call."""
        return self._calls[key].suspicion

    def keys(self, server: str) -> list[str]:
        """Returns the calls that run in a server."""
        return list(self._servers[server].running) if server in self._servers else []

    def assign(self) -> list[Assignment]:
        """Assigns waiting calls to servers with room, oldest first."""
        found: list[Assignment] = []
        for pool, waiting in self._waiting.items():
            room = self._pool(pool)
            passed_over: list[str] = []
            while waiting and room.free:
                key = next(iter(waiting))
                if server := self._choose(key):
                    self._bind(key, server)
                    found.append(Assignment(key, server))
                else:  # the call or a running one is a suspect: no server with room may take it
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
        """Removes a call from its server."""
        if server in self._servers:
            self._servers[server].running.pop(key, None)
            self._count(server)

    def _count(self, server: str) -> None:
        """Updates the pool's count of this server's free places."""
        known = self._servers[server]
        before, known.counted = known.counted, known.free
        self._pool(known.pool).count(server, before, known.counted)

    def _pool(self, name: str) -> _Pool:
        return self._pools.setdefault(name, _Pool())

    def _takes(self, server: str, call: _Call) -> bool:
        """Whether a server may get this call now: it has room, and two suspects would not share it."""
        known = self._servers.get(server)
        if known is None or not known.free:
            return False
        if self._isolates:
            return not known.running or not (call.suspicion >= SUSPECT or self._has_suspect(known))
        if call.suspicion < SUSPECT:
            return True
        return not any(self._calls[key].suspicion >= SUSPECT for key in known.running)

    def _has_suspect(self, server: _Server) -> bool:
        """Whether the server runs a suspect; with isolation, a suspect runs alone."""
        return len(server.running) == 1 and self._calls[next(iter(server.running))].suspicion >= SUSPECT

    def _choose(self, key: str) -> str:
        """Returns the server for a call; empty if no server may take it now."""
        call = self._calls[key]
        home = self._homes.get((call.pool, call.group), "")
        if home and self._takes(home, call):
            return home
        pool = self._pools[call.pool]
        roomy = pool.servers if len(pool.servers) <= FEW_SERVERS else pool.names
        drawn = roomy if len(roomy) <= FEW_SERVERS else self._draw.sample(roomy, DRAWN)
        open_ = [name for name in drawn if self._takes(name, call)]
        if not open_ and len(drawn) < len(roomy):  # the call is a suspect, and each drawn server has one
            open_ = [name for name in roomy if self._takes(name, call)]
        if not open_:
            return ""
        server = min(
            open_,
            key=lambda name: (self._servers[name].load, name not in self._near, self._draw.random()),
        )
        if home not in self._servers:
            self._homes.pop((call.pool, call.group), None)  # the group's server is gone: choose a new one
        return server
