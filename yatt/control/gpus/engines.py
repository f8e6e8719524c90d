"""The awake engines of one node, and the requests that run in them.

This is the second of two stages (`yatt.core.requests.dispatch`). The router of a trainer node assigns each
request to a node (`yatt.control.rollouts.router`); `LocalEngines` assigns it to an engine. If an engine dies,
its requests fail, and the router sends them again with the same seed. If an engine is put to sleep, its
requests are returned: completions go on elsewhere with the tokens that they have, other requests are sent
again without counting a retry.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from yatt.adapters.net.channel import Channel
from yatt.adapters.net.crowd import Spawned
from yatt.config.check import engine_roles, max_num_seqs
from yatt.config.schema import RunConfig
from yatt.control.gpus.prepared_requests import MediaUnusable, PreparedRequests
from yatt.core.gpus.placement import ROLLOUT, Slab, genrm_of_role
from yatt.core.requests.dispatch import Dispatch
from yatt.errors import WorkerFailed
from yatt.records import message as m
from yatt.records.load import SlabLoad

ABORTED = "abort"
AHEAD = 1.25
"""Number of requests given to an engine, as a multiple of those that it can run at once: when one ends, the
next must already be there."""


class Bounced(WorkerFailed):
    """The request is not the cause: its engine was put to sleep, or its node is lost."""


def engine_room(config: RunConfig, role: str) -> int:
    """Returns the number of requests that one engine of a role is given at once."""
    return 2 if config.run.deterministic else max(2, int(max_num_seqs(config, role) * AHEAD))


@dataclass(slots=True)
class _Engine:
    address: str
    role: str
    slab: Slab
    token: int
    takes_requests: bool


@dataclass(slots=True)
class _Request:
    role: str
    sample: m.SampleRequest
    future: "asyncio.Future[m.Completed]"
    engine: str = ""
    is_aborted: bool = False
    """Whether its sender has aborted it."""


class _Engines:
    """The processes of this node's engines, by address.

    Attributes:
        awake: those that are awake.
        leaving: the role of those that fall asleep.
        useful: those that were of use: they have completed a request, or take none.
    """

    def __init__(self, config: RunConfig) -> None:
        self.rooms = {role: engine_room(config, role) for role in engine_roles(config)}
        self.awake: dict[str, _Engine] = {}
        self.leaving: dict[str, str] = {}
        self.useful: set[str] = set()

    def add(self, engine: _Engine) -> None:
        """Adds a process that is awake."""
        self.leaving.pop(engine.address, None)
        self.awake[engine.address] = engine
        if not engine.takes_requests:
            self.useful.add(engine.address)

    def drain(self, address: str) -> _Engine | None:
        """Notes that an engine falls asleep; returns it, if it was awake."""
        engine = self.awake.pop(address, None)
        if engine is not None:
            self.leaving[address] = engine.role
        return engine

    def room(self, role: str) -> int:
        """Returns the number of requests that awake engines of a role run at once."""
        return self.rooms[role] * sum(e.role == role and e.takes_requests for e in self.awake.values())


class _Requests:
    """The requests on this node, by key, and their numbers by role and requesting node."""

    def __init__(self) -> None:
        self.by_key: dict[str, _Request] = {}
        self._num_of: Counter[tuple[str, str]] = Counter()
        self._num_all: Counter[str] = Counter()
        self._ids = itertools.count(1)

    def add(self, role: str, sample: m.SampleRequest) -> tuple[str, "asyncio.Future[m.Completed]"]:
        """Adds a request; returns its key and what becomes its answer."""
        key = f"{sample.request_id}#{next(self._ids)}"
        future: asyncio.Future[m.Completed] = asyncio.get_running_loop().create_future()
        self.by_key[key] = _Request(role, sample, future)
        self._count(role, sample, 1)
        return key, future

    def remove(self, key: str) -> _Request | None:
        """Removes a request, if it is here."""
        request = self.by_key.pop(key, None)
        if request is not None:
            self._count(request.role, request.sample, -1)
        return request

    def waiting(self, role: str) -> list[str]:
        """Returns the requests of a role that no engine has yet."""
        return [key for key, each in self.by_key.items() if each.role == role and not each.engine]

    def num_but(self, role: str, origin: str) -> int:
        """Returns the number of requests of a role, other than those of one node."""
        return self._num_all[role] - self._num_of[role, origin]

    def _count(self, role: str, sample: m.SampleRequest, change: int) -> None:
        self._num_all[role] += change
        self._num_of[role, sample.request_id.partition("/")[0]] += change


class LocalEngines:
    """This node's awake engines and the requests that run in them."""

    def __init__(self, channel: Channel, config: RunConfig) -> None:
        self.channel = channel
        self._subscribers: list[Callable[[str], None]] = []
        self._engines, self._requests = _Engines(config), _Requests()
        self._dispatch = Dispatch(patience=0)  # the requesting node decides about retries
        self._tasks = Spawned()
        self._prepared: PreparedRequests | None = None
        self.version = 0
        """A counter that rises whenever the room of this node's engines changes."""

    def subscribe(self, changed: Callable[[str], None]) -> None:
        """Registers a function, called with a role whenever the room of its engines here has changed."""
        self._subscribers.append(changed)

    def prepare_with(self, prepared: PreparedRequests) -> None:
        """Sets what prepares the pictures of requests, in runs that have some."""
        self._prepared = prepared

    def _changed(self, role: str) -> None:
        for changed in self._subscribers:
            changed(role)

    async def add(
        self, address: str, role: str, slab: Slab, token: int, *, takes_requests: bool = True
    ) -> None:
        """Adds an engine's process that is awake under `token`. A follower rank takes no requests: rank 0
        counts the failures of the whole engine."""
        self._engines.add(_Engine(address, role, slab, token, takes_requests))
        if not takes_requests:
            return
        self._dispatch.serve(address, role, self._engines.rooms[role])
        self.version += 1
        self._changed(role)
        await self._pump()

    def drain(self, address: str) -> None:
        """Gives an engine no more requests, because it is put to sleep. It returns those that it has with
        their tokens; then `remove` it."""
        engine = self._engines.drain(address)
        if engine is None:
            return
        for key in self._dispatch.leave(address):
            self._dispatch.done(key)
        self._room_fell(engine.role)

    def remove(self, address: str, why: str, *, is_blamed: bool = False) -> None:
        """Removes an engine that sleeps or has ended, and returns its requests to their senders. An engine
        that ends while it is put to sleep was killed for that, so no request is the cause."""
        role = self._engines.leaving.pop(address, "")
        kind = WorkerFailed if is_blamed and not role else Bounced
        if (engine := self._engines.awake.pop(address, None)) is not None:
            self._dispatch.leave(address)
        for key, request in [*self._requests.by_key.items()]:
            if request.engine != address:
                continue
            if request.is_aborted:
                self._end(key, completed=nothing_yet(key))
            else:
                self._end(key, error=kind(f"{address} {why}"))
        if engine is not None:
            self._room_fell(engine.role)

    def _room_fell(self, role: str) -> None:
        self.version += 1
        self._changed(role)
        if not self.room(role):  # waiting requests may find room on another node
            for key in self._requests.waiting(role):
                self._end(key, error=_none_left(role))

    def was_of_use(self, address: str) -> bool:
        """Whether an engine's process has completed a request, or takes none."""
        return address in self._engines.useful

    def bury(self, address: str) -> bool:
        """Removes an engine's process from the records. Returns whether it was of use."""
        was_useful = self.was_of_use(address)
        self._engines.useful.discard(address)
        return was_useful

    def is_awake(self, address: str) -> bool:
        """Whether this engine accepts requests."""
        return address in self._engines.awake

    def room(self, role: str) -> int:
        """Returns the number of requests that this node's awake engines of a role run at once."""
        return self._engines.room(role)

    def loads(self) -> tuple[SlabLoad, ...]:
        """Returns the number of requests on each slab with an awake engine."""
        found = {(e.slab.index, e.role): 0 for e in self._engines.awake.values() if e.takes_requests}
        for request in self._requests.by_key.values():
            if (engine := self._engines.awake.get(request.engine)) is not None:
                found[engine.slab.index, engine.role] += 1
        return tuple(SlabLoad(slab, role, num) for (slab, role), num in found.items())

    def num_waiting(self, role: str) -> int:
        """Returns the number of requests on this node that no engine has yet."""
        return len(self._requests.waiting(role))

    def num_under_way(self, role: str, but: str) -> int:
        """Returns the number of requests of a role on this node, other than those of node `but`."""
        return self._requests.num_but(role, but)

    def completed(self, address: str, body: m.Completed) -> None:
        """Passes an engine's answer to the request that waits for it."""
        request = self._requests.by_key.get(body.request_id)
        if request is None or request.engine != address:
            return
        if body.finish_reason == m.LOST:
            self._end(body.request_id, error=WorkerFailed(f"{address}: {body.error}"))
        elif body.finish_reason == ABORTED and not request.is_aborted and address in self._engines.leaving:
            self._returned(request, body)
        else:
            self._engines.useful.add(address)
            self._end(body.request_id, completed=_with_watched(body, request.sample, address))

    def _returned(self, request: _Request, body: m.Completed) -> None:
        """Handles a request whose engine is put to sleep. A completion keeps its tokens. An answer of a GenRM
        begins anew: a part of a verdict could not be continued in its structure."""
        key = body.request_id
        if request.role == ROLLOUT:
            self._end(key, completed=msgspec.structs.replace(body, finish_reason=m.MOVED))
        else:
            self._end(key, error=Bounced(f"{request.engine} was put to sleep"))

    async def complete(self, role: str, sample: m.SampleRequest) -> m.Completed:
        """Runs one request in a local engine of `role`.

        Raises:
            WorkerFailed: the engine died meanwhile.
            Bounced: the engine was put to sleep meanwhile, or no engine of the role is left here: the
                request was on its way when the last one was taken away, and would wait here for ever.
        """
        if not self.room(role):
            raise _none_left(role)
        key, future = self._requests.add(role, sample)
        try:
            if sample.media and self._prepared is not None:
                await self._prepare(key, self._prepared)
            if key in self._requests.by_key:  # not aborted meanwhile
                group = f"{sample.request_id.partition('/')[0]}/{sample.group}" if sample.group else ""
                self._dispatch.submit(key, role, group, sample.suspicion)
                await self._pump()
            return await future
        except asyncio.CancelledError:
            await self._abandon(key)
            raise

    async def _prepare(self, key: str, prepared: PreparedRequests) -> None:
        """Has the pictures of a request prepared, unless it ends meanwhile."""
        request = self._requests.by_key[key]
        task = asyncio.ensure_future(prepared.with_prepared(request.sample, key, genrm_of_role(request.role)))
        try:
            either: set[asyncio.Future[Any]] = {task, request.future}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not request.future.done():
                request.sample = task.result()
        except MediaUnusable as error:
            self._end(key, completed=_refused_media(request.sample, str(error)))
        except WorkerFailed as error:
            self._end(key, error=error)
        finally:
            if not task.cancel() and not task.cancelled():
                task.exception()  # the request may have ended before it failed
            if key not in self._requests.by_key:
                prepared.release(request.sample, key)  # it may have ended before they were held

    async def abort(self, role: str, origin: str, request_ids: tuple[str, ...] = ()) -> None:
        """Aborts the requests of `origin` in the role's engines: all, or only `request_ids`. Each completes
        with the finish reason 'abort'."""
        ids: dict[str, list[str]] = {}
        for key, request in list(self._requests.by_key.items()):
            asked = request.sample.request_id
            if request.role != role or not asked.startswith(f"{origin}/"):
                continue
            if request_ids and asked not in request_ids:
                continue
            request.is_aborted = True
            if request.engine:
                ids.setdefault(request.engine, []).append(key)
            else:
                self._end(key, completed=nothing_yet(key))
        for address, keys in ids.items():
            if (engine := self._engines.awake.get(address)) is not None:
                await self.channel.tell(address, m.Abort(request_ids=tuple(keys)), token=engine.token)

    async def _pump(self) -> None:
        for assignment in self._dispatch.assign():
            request, engine = self._requests.by_key[assignment.key], self._engines.awake[assignment.server]
            request.engine = engine.address
            asked = msgspec.structs.replace(request.sample, request_id=assignment.key, group="")
            await self.channel.tell(engine.address, asked, token=engine.token)

    async def _abandon(self, key: str) -> None:
        """Ends a request that is not awaited any more, and aborts it in its engine."""
        request = self._requests.by_key.get(key)
        engine = self._engines.awake.get(request.engine) if request is not None else None
        self._end(key)
        if engine is not None:
            await self.channel.tell(engine.address, m.Abort(request_ids=(key,)), token=engine.token)

    def _end(self, key: str, *, completed: m.Completed | None = None, error: Exception | None = None) -> None:
        self._dispatch.done(key)
        request = self._requests.remove(key)
        if request is None:
            return
        if request.sample.media and self._prepared is not None:
            self._prepared.release(request.sample, key)
        if request.future.done():
            return
        if completed is not None:
            request.future.set_result(completed)
        elif error is not None:
            request.future.set_exception(error)
        self._tasks.spawn(self._pump())


def _none_left(role: str) -> Bounced:
    return Bounced(f"no engine of {role} is left here")


def _refused_media(sample: m.SampleRequest, error: str) -> m.Completed:
    return msgspec.structs.replace(nothing_yet(sample.request_id), finish_reason=m.MEDIA_FAULT, error=error)


def _with_watched(body: m.Completed, sample: m.SampleRequest, address: str) -> m.Completed:
    """Returns the answer, refused if it lacks log-probs that the request asked for: without them a verdict
    would silently be another one."""
    is_whole = len(body.watched) == len(body.token_ids) * len(sample.watched)
    if is_whole or body.finish_reason == ABORTED:
        return body
    error = (
        f"{address} has not given the log-probs of {len(sample.watched)} watched tokens at each of its own"
    )
    refused = nothing_yet(body.request_id)
    return msgspec.structs.replace(refused, finish_reason="error", error=error)


def nothing_yet(key: str) -> m.Completed:
    """Returns the answer to a request that was aborted before an engine received it."""
    return m.Completed(request_id=key, token_ids=b"", logprobs=b"", finish_reason=ABORTED, policy_version=0)
