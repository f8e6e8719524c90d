"""Requests to engines: to the local ones by the hub, to other nodes' by their controllers.

Two stages by the same rules (`yatt.core.dispatch`): the router of a trainer's node binds each request to a
node, that node's `LocalEngines` to an engine. Requests wait where they were made until an engine somewhere
has room; those of a prompt group go to one engine. An engine that dies fails its requests; they are asked
for again, with the same seed. A node that is lost, or an engine that is put to sleep, is no fault of a
request.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from yatt.adapters.wire import Channel
from yatt.config.schema import RunConfig
from yatt.control.node import Node
from yatt.control.peers import Peers
from yatt.control.progress import Progress
from yatt.core.dispatch import Dispatch
from yatt.core.placement import Slab
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import cluster as c, message as m

ABORTED = "abort"
AHEAD = 1.25
"""Requests an engine is given for each it can run at once: one that ends must not wait for the next over
the wire."""


class Bounced(WorkerFailed):
    """A request came back through no fault of its own: its engine was put to sleep, or its node is lost."""


def engine_room(config: RunConfig, role: str) -> int:
    """Requests that one engine of a role is given at once."""
    genrm = next((g for g in config.genrms if role == f"genrm:{g.name}"), None)
    most = genrm.max_num_seqs if genrm is not None else config.rollout.max_num_seqs
    return 2 if config.run.deterministic else max(2, int(most * AHEAD))


@dataclass(slots=True)
class _Engine:
    wire: str
    role: str
    slab: Slab
    token: int


@dataclass(slots=True)
class _Request:
    role: str
    sample: m.Sample
    future: "asyncio.Future[m.Completed]"
    engine: str = ""


class LocalEngines:
    """This node's awake engines and what is under way in them.

    Args:
        changed: called with a role when the room of its engines here has changed.
    """

    def __init__(self, hub: Channel, config: RunConfig, changed: Callable[[str], None]) -> None:
        self.hub, self._config, self._changed = hub, config, changed
        self._engines: dict[str, _Engine] = {}
        self._requests: dict[str, _Request] = {}
        self._useful: set[str] = set()  # wires that have completed something
        self._num_of: Counter[tuple[str, str]] = Counter()  # requests by role and asking node
        self._num_all: Counter[str] = Counter()  # by role
        self._dispatch = Dispatch(patience=0)  # whether to ask again is decided where the request was made
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Future[None]] = set()
        self.version = 0
        """Rises whenever the room of this node's engines changes."""

    async def add(self, wire: str, role: str, slab: Slab, token: int) -> None:
        """An engine is awake under `token`."""
        self._engines[wire] = _Engine(wire, role, slab, token)
        self._dispatch.serve(wire, role, engine_room(self._config, role))
        self.version += 1
        self._changed(role)
        await self._pump()

    def remove(self, wire: str, why: str, *, is_blamed: bool = False) -> None:
        """An engine sleeps or is gone: what was under way in it goes back to who asked."""
        engine = self._engines.pop(wire, None)
        if engine is None:
            return
        kind = WorkerFailed if is_blamed else Bounced
        for key in self._dispatch.leave(wire):
            self._end(key, error=kind(f"{wire} {why}"))
        self.version += 1
        self._changed(engine.role)
        if not self.room(engine.role):  # what waits here may find room elsewhere
            waiting = [k for k, r in self._requests.items() if r.role == engine.role and not r.engine]
            for key in waiting:
                self._end(key, error=Bounced(f"no engine of {engine.role} is left here"))

    def bury(self, wire: str) -> bool:
        """Forget an engine's process; whether it ever completed anything."""
        was_useful = wire in self._useful
        self._useful.discard(wire)
        return was_useful

    def is_awake(self, wire: str) -> bool:
        """Whether this engine takes requests."""
        return wire in self._engines

    def room(self, role: str) -> int:
        """Requests that this node's awake engines of a role take at once."""
        return sum(engine_room(self._config, role) for e in self._engines.values() if e.role == role)

    def num_under_way(self, role: str, but: str) -> int:
        """Requests of a role on this node, other than those of node `but`."""
        return self._num_all[role] - self._num_of[role, but]

    def completed(self, wire: str, body: m.Completed) -> None:
        """Hand an engine's answer to who asked."""
        request = self._requests.get(body.request_id)
        if request is None or request.engine != wire:
            return
        if body.finish_reason == m.LOST:
            self._end(body.request_id, error=WorkerFailed(f"{wire}: {body.error}"))
        else:
            self._useful.add(wire)
            self._end(body.request_id, completed=body)

    async def complete(self, role: str, sample: m.Sample) -> m.Completed:
        """Let a local engine of `role` do this.

        Raises:
            WorkerFailed: the engine died meanwhile.
            Bounced: the engine was put to sleep meanwhile.
        """
        key = f"{sample.request_id}#{next(self._ids)}"
        future: asyncio.Future[m.Completed] = asyncio.get_running_loop().create_future()
        self._requests[key] = _Request(role, sample, future)
        self._count(role, sample, 1)
        group = f"{sample.request_id.partition('/')[0]}/{sample.group}" if sample.group else ""
        self._dispatch.submit(key, role, group, sample.suspicion)
        await self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            await self._abandon(key)
            raise

    async def abort(self, role: str, origin: str, request_ids: tuple[str, ...] = ()) -> None:
        """Break off what `origin` has under way in the role's engines, or these of it; each completes as
        'abort'."""
        ids: dict[str, list[str]] = {}
        for key, request in list(self._requests.items()):
            asked = request.sample.request_id
            if request.role != role or not asked.startswith(f"{origin}/"):
                continue
            if request_ids and asked not in request_ids:
                continue
            if request.engine:
                ids.setdefault(request.engine, []).append(key)
            else:
                self._end(key, completed=_nothing_yet(key))
        for wire, keys in ids.items():
            if (engine := self._engines.get(wire)) is not None:
                await self.hub.tell(wire, m.Abort(token=engine.token, request_ids=tuple(keys)))

    async def _pump(self) -> None:
        for assignment in self._dispatch.assign():
            request, engine = self._requests[assignment.key], self._engines[assignment.server]
            request.engine = engine.wire
            asked = msgspec.structs.replace(
                request.sample, token=engine.token, request_id=assignment.key, group=""
            )
            await self.hub.tell(engine.wire, asked)

    async def _abandon(self, key: str) -> None:
        """Nobody waits for it any more: the engine need not go on."""
        request = self._requests.get(key)
        engine = self._engines.get(request.engine) if request is not None else None
        self._end(key)
        if engine is not None:
            await self.hub.tell(engine.wire, m.Abort(token=engine.token, request_ids=(key,)))

    def _end(self, key: str, *, completed: m.Completed | None = None, error: Exception | None = None) -> None:
        self._dispatch.done(key)
        request = self._requests.pop(key, None)
        if request is not None:
            self._count(request.role, request.sample, -1)
        if request is None or request.future.done():
            return
        if completed is not None:
            request.future.set_result(completed)
        elif error is not None:
            request.future.set_exception(error)
        task = asyncio.ensure_future(self._pump())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _count(self, role: str, sample: m.Sample, change: int) -> None:
        self._num_all[role] += change
        self._num_of[role, sample.request_id.partition("/")[0]] += change


def _nothing_yet(key: str) -> m.Completed:
    return m.Completed(request_id=key, token_ids=b"", logprobs=b"", finish_reason=ABORTED, policy_version=0)


class Router:
    """Requests to the engines of a role anywhere in the cluster.

    Args:
        peers: lines to the other controllers.
        progress: hears that other nodes get on with what they were asked.
    """

    def __init__(self, node: Node, local: LocalEngines, peers: Peers, progress: Progress) -> None:
        self._node, self._local, self._peers, self._progress = node, local, peers, progress
        near = frozenset(_place(role, node.index) for role in node.placement.pools)
        retries = node.config.rollout.max_retries
        self._dispatch = Dispatch(patience=retries, near=near, salt=node.name)
        self._waiting: dict[str, _Waiting] = {}
        self._keys = itertools.count(1)
        self._versions: dict[tuple[str, int], int] = {}
        for role, pool in node.placement.pools.items():
            for index in pool - peers.lost:
                slabs = node.placement.num_slabs[role][index]
                self._dispatch.serve(_place(role, index), role, engine_room(node.config, role) * slabs)

    def room(self, role: str, index: int, room: int, version: int, elsewhere: int = 0) -> None:
        """A node's engines of a role take so many requests; others have asked so much of them."""
        if index in self._peers.lost or version < self._versions.get((role, index), 0):
            return
        self._versions[role, index] = version
        self._dispatch.serve(_place(role, index), role, room, elsewhere)
        self._pump()

    def lose(self, index: int) -> None:
        """A node is gone: what was asked of it is asked elsewhere, and that is no retry."""
        for role in self._node.placement.pools:
            self._dispatch.leave(_place(role, index))
            if not self._is_served(role):
                for waiting in self._of(role):
                    waiting.place.set_exception(_nobody(role))
        self._pump()

    async def complete(self, role: str, sample: m.Sample) -> m.Completed:
        """One completion, asked for again if an engine is lost.

        Raises:
            WorkerFailed | DeadlineExceeded: still not there after the retries, or no node is left.
        """
        key = f"{role} {next(self._keys)}"
        self._dispatch.submit(key, role, sample.group)
        try:
            while True:
                index = await self._place_for(key, role, sample.request_id)
                if index is None:
                    return _nothing_yet(sample.request_id)
                try:
                    return await self._ask(index, role, sample, self._dispatch.suspicion(key))
                except Bounced:
                    self._dispatch.bounce(key)
                except (WorkerFailed, DeadlineExceeded):
                    if index in self._peers.lost:
                        self._dispatch.bounce(key)
                    elif not self._dispatch.suspect(key):
                        raise
        finally:
            self._dispatch.done(key)
            self._pump()

    async def abort(self, role: str, request_ids: tuple[str, ...] = ()) -> None:
        """Break off everything this node has under way with `role`, or these requests, wherever they are."""
        for waiting in self._of(role):
            if not request_ids or waiting.request_id in request_ids:
                waiting.place.set_result(None)
        ids = tuple(f"{self._node.name}/{request_id}" for request_id in request_ids)
        await self._local.abort(role, self._node.name, ids)
        for index in self._node.placement.pools[role] - self._peers.lost - {self._node.index}:
            await self._peers.tell(index, c.ForwardAbort(role=role, origin=self._node.name, request_ids=ids))

    def _pump(self) -> None:
        for assignment in self._dispatch.assign():
            waiting = self._waiting.get(assignment.key)
            if waiting is not None and not waiting.place.done():
                waiting.place.set_result(_index(assignment.server))

    async def _place_for(self, key: str, role: str, request_id: str) -> int | None:
        """The node that has room for a request, whenever one has; None if it was broken off before."""
        if not self._is_served(role):
            raise _nobody(role)
        place: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = _Waiting(role, request_id, place)
        self._pump()
        try:
            return await place
        finally:
            del self._waiting[key]

    def _of(self, role: str) -> "list[_Waiting]":
        return [each for each in self._waiting.values() if each.role == role and not each.place.done()]

    def _is_served(self, role: str) -> bool:
        return self._dispatch.has_servers(role)

    async def _ask(self, index: int, role: str, sample: m.Sample, suspicion: int) -> m.Completed:
        """Raises WorkerFailed, Bounced or DeadlineExceeded; what is not waited for any more is aborted."""
        request_id = f"{self._node.name}/{sample.request_id}"
        sample = msgspec.structs.replace(sample, request_id=request_id, suspicion=suspicion)
        if index == self._node.index:
            return await self._local.complete(role, sample)
        limit_s = self._node.config.rollout.request_timeout_s
        try:
            forward, moved = c.Forward(role=role, sample=sample), self._progress.heard
            answer = await self._peers.request(index, forward, limit_s, moved)
            moved()
        except (asyncio.CancelledError, DeadlineExceeded):
            abort = c.ForwardAbort(role=role, origin=self._node.name, request_ids=(request_id,))
            await self._peers.tell(index, abort)
            raise
        if isinstance(answer, c.Forwarded):
            self.room(role, index, answer.room, answer.version, answer.elsewhere)
            return answer.completed
        if isinstance(answer, c.ForwardBounced):
            self.room(role, index, answer.room, answer.version)
            raise Bounced(answer.why)
        raise WorkerFailed(answer.error if isinstance(answer, c.OrderFailed | m.Failed) else repr(answer))


@dataclass(slots=True)
class _Waiting:
    """A request that is not bound to a node yet."""

    role: str
    request_id: str
    place: "asyncio.Future[int | None]"


def _nobody(role: str) -> WorkerFailed:
    return WorkerFailed(f"no node is left that can run {role}")


def _place(role: str, index: int) -> str:
    return f"{role}@{index}"


def _index(place: str) -> int:
    return int(place.rpartition("@")[2])
