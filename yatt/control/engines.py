"""Requests to engines: to the local ones by the hub, to other nodes' by their controllers.

A request goes to the node whose engines of the role have least outstanding from here, own node
first among equals. An engine that dies fails its requests; they are asked for again, with the same
seed, up to `rollout.max_retries` times. A node that is lost is never asked again, and what was asked of
it is asked elsewhere at once; that is no retry, since the request is not to blame.
"""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from yatt.adapters.wire import Channel
from yatt.control.node import Node
from yatt.control.peers import Peers
from yatt.core.placement import Slab
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import message as m
from yatt.records.cluster import Forward, ForwardAbort, OrderFailed

ABORTED = "abort"


@dataclass(slots=True)
class _LocalEngine:
    wire: str
    role: str
    slab: Slab
    token: int
    pending: dict[str, asyncio.Future[m.Completed]] = field(default_factory=dict)


class LocalEngines:
    """This node's awake engines and what is under way in them."""

    def __init__(self, hub: Channel) -> None:
        self.hub = hub
        self._engines: dict[str, _LocalEngine] = {}
        self._changed = asyncio.Condition()
        self._ids = itertools.count(1)

    async def add(self, wire: str, role: str, slab: Slab, token: int) -> None:
        """An engine is awake under `token`."""
        async with self._changed:
            self._engines[wire] = _LocalEngine(wire, role, slab, token)
            self._changed.notify_all()

    def remove(self, wire: str, why: str) -> None:
        """An engine sleeps or is gone; what was under way fails."""
        engine = self._engines.pop(wire, None)
        for future in engine.pending.values() if engine else ():
            if not future.done():
                future.set_exception(WorkerFailed(f"{wire} {why}"))

    def is_awake(self, wire: str) -> bool:
        """Whether this engine takes requests."""
        return wire in self._engines

    def awake(self, role: str) -> list[tuple[str, int]]:
        """(wire name, token) of the awake engines of `role`."""
        return [(e.wire, e.token) for e in self._engines.values() if e.role == role]

    def completed(self, wire: str, body: m.Completed) -> None:
        """Hand an engine's answer to who asked."""
        engine = self._engines.get(wire)
        future = engine.pending.pop(body.request_id, None) if engine else None
        if future is not None and not future.done():
            future.set_result(body)

    async def complete(self, role: str, sample: m.Sample, deadline_s: float) -> m.Completed:
        """Ask the local engine of `role` with least under way.

        Raises:
            WorkerFailed: the engine died meanwhile.
            DeadlineExceeded: no engine awake, or no answer, in time.
        """
        try:
            return await asyncio.wait_for(self._complete(role, sample), deadline_s)
        except TimeoutError:
            raise DeadlineExceeded(f"no {role} engine here answered within {deadline_s:g} s") from None

    async def _complete(self, role: str, sample: m.Sample) -> m.Completed:
        async with self._changed:
            await self._changed.wait_for(lambda: self.awake(role))
        engine = min(
            (e for e in self._engines.values() if e.role == role), key=lambda e: (len(e.pending), e.wire)
        )
        request_id = f"{sample.request_id}#{next(self._ids)}"
        future: asyncio.Future[m.Completed] = asyncio.get_running_loop().create_future()
        engine.pending[request_id] = future
        asked = msgspec.structs.replace(sample, token=engine.token, request_id=request_id)
        await self.hub.tell(engine.wire, asked)
        try:
            return await future
        finally:
            engine.pending.pop(request_id, None)

    async def abort(self, role: str, origin: str) -> None:
        """Break off what `origin` has under way in the role's engines; it completes as 'abort'."""
        for engine in [e for e in self._engines.values() if e.role == role]:
            ids = tuple(key for key in engine.pending if key.startswith(f"{origin}/"))
            if ids:
                await self.hub.tell(engine.wire, m.Abort(token=engine.token, request_ids=ids))


class Router:
    """Requests to the engines of a role anywhere in the cluster.

    Args:
        peers: lines to the other controllers.
    """

    def __init__(self, node: Node, local: LocalEngines, peers: Peers) -> None:
        self._node, self._local, self._peers = node, local, peers
        self._outstanding: Counter[tuple[str, int]] = Counter()

    async def complete(self, role: str, sample: m.Sample) -> m.Completed:
        """One completion, asked for again if an engine is lost.

        Raises:
            WorkerFailed | DeadlineExceeded: still not there after the retries.
        """
        section = self._node.config.rollout
        sample = msgspec.structs.replace(sample, request_id=f"{self._node.name}/{sample.request_id}")
        failed: set[int] = set()
        retries = 0
        while True:
            place = self._choose(role, failed)
            self._outstanding[role, place] += 1
            try:
                return await self._ask(place, role, sample)
            except (WorkerFailed, DeadlineExceeded):
                if place in self._peers.lost:
                    continue
                if retries >= section.max_retries:
                    raise
                retries += 1
                failed.add(place)
            finally:
                self._outstanding[role, place] -= 1

    async def abort(self, role: str) -> None:
        """Break off everything this node has under way with `role`, wherever it is."""
        await self._local.abort(role, self._node.name)
        for index in self._node.placement.pools[role] - self._peers.lost - {self._node.index}:
            await self._peers.tell(index, ForwardAbort(role=role, origin=self._node.name))

    def _choose(self, role: str, failed: set[int]) -> int:
        """The node to ask; one that failed this request only when there is no other.

        Raises:
            WorkerFailed: every node of the role is lost; the attempt is about to end.
        """
        counts = self._node.placement.num_slabs[role]
        there = counts.keys() - self._peers.lost
        if not there:
            raise WorkerFailed(f"no node is left that can run {role}")
        return min(
            there,
            key=lambda n: (n in failed, self._outstanding[role, n] / counts[n], n != self._node.index, n),
        )

    async def _ask(self, place: int, role: str, sample: m.Sample) -> m.Completed:
        limit_s = self._node.config.rollout.request_timeout_s
        if place == self._node.index:
            return await self._local.complete(role, sample, limit_s)
        answer = await self._peers.request(place, Forward(role=role, sample=sample), limit_s)
        if isinstance(answer, OrderFailed):
            raise WorkerFailed(answer.error)
        assert isinstance(answer, m.Completed), f"a Forward is answered by Completed, not {answer!r}"
        return answer
