"""Assigns each request to a node with room, and sends it to that node's controller, or to local engines.

This is the first of two stages (`yatt.core.requests.dispatch`); the second is `yatt.control.gpus.engines`.
Requests wait here until an engine of any node has room. Requests of one prompt group go to one engine. If a
node is lost or an engine is put to sleep, the request is sent elsewhere without counting a retry.
"""

import asyncio
import itertools
from dataclasses import dataclass

import msgspec

from yatt.control.gpus.engines import Bounced, LocalEngines, engine_room, nothing_yet
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.requests.dispatch import Dispatch
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import cluster as c, message as m


class Router:
    """Sends requests to the engines of a role on any node.

    Args:
        peers: connections to the other controllers.
        progress: records progress of other nodes on requests.
    """

    def __init__(self, node: Node, local: LocalEngines, peers: Peers, progress: Progress) -> None:
        self._node, self._local, self._peers, self._progress = node, local, peers, progress
        near = frozenset(_place(role, node.index) for role in node.placement.pools)
        retries = node.config.rollout.max_retries
        self._dispatch = Dispatch(patience=retries, near=near, salt=node.name)
        self._requests: dict[str, _Request] = {}
        self._keys = itertools.count(1)
        self._versions: dict[tuple[str, int], int] = {}
        self.expected = 0
        """Number of requests to rollout that are about to come."""
        for role, pool in node.placement.pools.items():
            for index in pool - peers.lost:
                engines = 0 if node.placement.shared else node.placement.num_engines[role][index]
                self._dispatch.serve(_place(role, index), role, engine_room(node.config, role) * engines)
        if node.is_trainer_node:
            local.subscribe(self._local_room)
        peers.subscribe(lost=self._lose, admitted=self._join)

    def _local_room(self, role: str) -> None:
        self.room(role, self._node.index, self._local.room(role), self._local.version)

    def room(self, role: str, index: int, room: int, version: int, elsewhere: int = 0) -> None:
        """Updates the room of a node's engines of a role, and how many requests they have of other nodes."""
        if index in self._peers.lost or version < self._versions.get((role, index), 0):
            return
        self._versions[role, index] = version
        self._dispatch.serve(_place(role, index), role, room, elsewhere)
        self._pump()

    @property
    def genrms(self) -> tuple[str, ...]:
        """The roles of GenRMs with engines."""
        return tuple(role for role in sorted(self._node.placement.pools) if role != ROLLOUT)

    def num_waiting(self, role: str) -> int:
        """Returns the number of this node's requests to a role that no node has yet."""
        return self._dispatch.num_waiting(role)

    def num_asked(self, role: str) -> int:
        """Returns the number of this node's requests to a role that are not answered."""
        return self._dispatch.num_calls(role)

    def _lose(self, index: int) -> None:
        """Handles a lost node: its requests are sent elsewhere without counting a retry."""
        for role in self._node.placement.pools:
            self._dispatch.leave(_place(role, index))
            if not self._is_served(role):
                for request in self._of(role):
                    request.fail(_nobody(role))
        self._pump()

    def _join(self, index: int) -> None:
        """Handles a node that joined again; it reports its room itself, from version 0 on."""
        for role in self._node.placement.pools:
            self._versions.pop((role, index), None)

    async def complete(self, role: str, sample: m.SampleRequest) -> m.Completed:
        """Returns one completion; it is requested again if an engine is lost, unless it was aborted.

        Raises:
            WorkerFailed | DeadlineExceeded: no completion after the retries, or no node is left.
        """
        key = f"{role} {next(self._keys)}"
        request = self._requests[key] = _Request(role, sample.request_id)
        self._dispatch.submit(key, role, sample.group)
        try:
            while (index := await self._place_for(request)) is not None:
                try:
                    return await self._ask(index, role, sample, self._dispatch.suspicion(key))
                except Bounced:
                    self._dispatch.bounce(key)
                except (WorkerFailed, DeadlineExceeded):
                    if index in self._peers.lost:
                        self._dispatch.bounce(key)
                    elif not self._dispatch.suspect(key) and not request.is_aborted:
                        raise
            return nothing_yet(sample.request_id)
        finally:
            del self._requests[key]
            self._dispatch.done(key)
            self._pump()

    async def abort(self, role: str, request_ids: tuple[str, ...] = ()) -> None:
        """Aborts this node's requests to `role` on all nodes: every one, or only `request_ids`. One that is
        returned by its node meanwhile is not sent again."""
        for request in self._of(role):
            if not request_ids or request.request_id in request_ids:
                request.abort()
        ids = tuple(f"{self._node.name}/{request_id}" for request_id in request_ids)
        await self._local.abort(role, self._node.name, ids)
        for index in self._node.placement.pools[role] - self._peers.lost - {self._node.index}:
            await self._peers.tell(index, c.ForwardAbort(role=role, origin=self._node.name, request_ids=ids))

    def _pump(self) -> None:
        for assignment in self._dispatch.assign():
            if (request := self._requests.get(assignment.key)) is not None:
                request.send_to(_index(assignment.server))

    async def _place_for(self, request: "_Request") -> int | None:
        """Waits for a node that has room for a request; None if it was aborted before."""
        if request.is_aborted:
            return None
        if not self._is_served(request.role):
            raise _nobody(request.role)
        place: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        request.place = place
        self._pump()
        try:
            index = await place
        finally:
            request.place = None
        return None if request.is_aborted else index

    def _of(self, role: str) -> "list[_Request]":
        return [each for each in self._requests.values() if each.role == role]

    def _is_served(self, role: str) -> bool:
        return self._dispatch.has_servers(role)

    async def _ask(self, index: int, role: str, sample: m.SampleRequest, suspicion: int) -> m.Completed:
        """Raises WorkerFailed, Bounced or DeadlineExceeded; aborts a request that is not awaited any more."""
        request_id = f"{self._node.name}/{sample.request_id}"
        sample = msgspec.structs.replace(sample, request_id=request_id, suspicion=suspicion)
        if index == self._node.index:
            try:
                return await self._local.complete(role, sample)
            except Bounced:
                self._local_room(role)  # as a remote node tells its room; else it is asked again at once
                raise
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
        raise WorkerFailed(answer.error)


@dataclass(slots=True)
class _Request:
    """A request that is not answered; `place` is set while it waits for a node."""

    role: str
    request_id: str
    place: "asyncio.Future[int | None] | None" = None
    is_aborted: bool = False

    def send_to(self, index: int | None) -> None:
        if self.place is not None and not self.place.done():
            self.place.set_result(index)

    def fail(self, error: WorkerFailed) -> None:
        if self.place is not None and not self.place.done():
            self.place.set_exception(error)

    def abort(self) -> None:
        self.is_aborted = True
        self.send_to(None)


def _nobody(role: str) -> WorkerFailed:
    return WorkerFailed(f"no node is left that can run {role}")


def _place(role: str, index: int) -> str:
    return f"{role}@{index}"


def _index(place: str) -> int:
    return int(place.rpartition("@")[2])
