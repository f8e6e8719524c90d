"""Engines that cannot be built on a slab that got another role: the slab goes back, and nothing else is lost.

Only for roles that the slab did not have at first: a move is for speed, so it must not cost the attempt.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from yatt.adapters.machine.host_memory import available_bytes, weights_bytes
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.config.schema import RunConfig
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.control.node import Node
from yatt.core.gpus.placement import ROLLOUT, Slab, genrm_role
from yatt.obs.story.events import EventLog
from yatt.records.events.slabs import EngineUnfit

PROCESS_BYTES = 1 << 30
"""Host memory of an engine's process beside weights and KV cache: libraries, and on GPUs the driver."""


LOOK_S = 5.0
"""Longest time to look at a model folder; less than a lease without heartbeats lasts."""


def engine_host_bytes(config: RunConfig, role: str, device: str) -> int:
    """Returns the host memory that one engine of a role needs at most, awake or asleep.

    On GPUs a GenRM that sleeps keeps its weights on the host; a rollout engine drops them, since it gets new
    ones.

    Raises:
        OSError: the model folder cannot be read.
    """
    genrm = next((g for g in config.engine_genrms if genrm_role(g.name) == role), None)
    if genrm is None:
        weights, cache = weights_bytes(config.model.path), config.rollout.kv_cache_bytes
    else:
        weights, cache = weights_bytes(genrm.model), genrm.kv_cache_bytes
    if device == "cpu":
        return PROCESS_BYTES + weights + cache
    return PROCESS_BYTES + (weights if role != ROLLOUT else 0)


class UnfitEngines:
    """The slabs and roles of this node whose engine could not be built.

    Attributes:
        report: called with (error, exit code) for a failure that this node cannot recover from.
    """

    def __init__(self, node: Node, events: EventLog, report: Callable[[str, int], None]) -> None:
        self._node, self._events, self.report = node, events, report
        self._errors: dict[tuple[Slab, str], str] = {}
        self._proved: set[tuple[Slab, str]] = set()
        self._subscribers: list[Callable[[Slab, str, str], None]] = []

    def subscribe(self, found: Callable[[Slab, str, str], None]) -> None:
        """Registers a function, called with the slab, the unfit role, and the role that the slab had
        first."""
        self._subscribers.append(found)

    def __contains__(self, slab_and_role: tuple[Slab, str]) -> bool:
        return slab_and_role in self._errors

    def proved(self, slab: Slab, role: str) -> None:
        """Records that the role's engine works on this slab: a later failure is no reason to give the slab
        back."""
        self._proved.add((slab, role))

    async def lack(self, worker: Worker) -> str:
        """Returns why this node has too little host memory for a role's first engines on a slab; '' if it has
        enough, or if that is not known."""
        if worker.slab is None or not self._is_first(worker):
            return ""
        num_engines = len(self._node.placement.engines_on(worker.slab, worker.role))
        node, role = self._node, worker.role
        size = partial(engine_host_bytes, node.config, role, node.device)
        try:
            async with asyncio.timeout(LOOK_S):
                needed = num_engines * await call_in_thread(size)
            available = available_bytes()
        except (OSError, TimeoutError):
            return ""
        if available >= needed:
            return ""
        sizes = f"{needed >> 20} MiB of host memory on this GPU set; {available >> 20} MiB"
        return f"{role} needs {sizes} are available"

    def _is_first(self, worker: Worker) -> bool:
        """Whether the worker is an engine of a role that its slab did not have at first, and that has not
        worked on it yet."""
        slab, role, placement = worker.slab, worker.role, self._node.placement
        if slab is None or slab not in placement.shared or (slab, role) in self._proved:
            return False
        return role in placement.engine_roles and role != placement.sampling[slab]

    def failed(self, worker: Worker, error: str) -> bool:
        """Handles an engine that does not come up; returns whether its slab goes back to its first role."""
        slab, role = worker.slab, worker.role
        if slab is None or not self._is_first(worker):
            return False
        first = self._node.placement.sampling[slab]
        if (slab, role) not in self._errors:
            self._errors[slab, role] = error
            self._events.emit(EngineUnfit(slab=slab.name, holder=role, first=first, error=error))
            for found in self._subscribers:
                found(slab, role, first)
        return True

    def found(self) -> tuple[tuple[int, str], ...]:
        """Returns slab (its index) and role of all of them."""
        return tuple(sorted((slab.index, role) for slab, role in self._errors))
