"""Engines that cannot be built on a slab that got another role: the slab goes back, and nothing else is lost.

Only for roles that the slab did not have at first: a move is for speed, so it must not cost the attempt.
"""

from collections.abc import Callable

from yatt.control.gpus.worker_plan import Worker
from yatt.control.node import Node
from yatt.core.placement import Slab
from yatt.obs.events import EventLog


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

    def failed(self, worker: Worker, error: str) -> bool:
        """Handles an engine that does not come up; returns whether its slab goes back to its first role."""
        slab, role = worker.slab, worker.role
        if slab is None or slab not in self._node.placement.shared or (slab, role) in self._proved:
            return False
        first = self._node.placement.sampling[slab]
        if role not in self._node.placement.engine_roles or role == first:
            return False
        if (slab, role) not in self._errors:
            self._errors[slab, role] = error
            self._events.emit("engine.unfit", slab=slab.name, holder=role, first=first, error=error)
            for found in self._subscribers:
                found(slab, role, first)
        return True

    def found(self) -> tuple[tuple[int, str], ...]:
        """Returns slab (its index) and role of all of them."""
        return tuple(sorted((slab.index, role) for slab, role in self._errors))
