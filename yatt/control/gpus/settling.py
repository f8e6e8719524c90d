"""Waits until a slab of this node is free, or is held by the role that is wanted."""

import asyncio
from collections.abc import Callable

from yatt.adapters.deadline import while_moving
from yatt.core.lease import SlabLease, Stage
from yatt.core.placement import Slab
from yatt.errors import DeadlineExceeded, WorkerFailed


class Settling:
    """The waits for one node's slabs.

    Args:
        lease: returns a slab's state.
        is_awake: whether a role holds a slab and its workers are awake.
        work: returns the progress of this node's workers.
    """

    def __init__(
        self, lease: Callable[[Slab], SlabLease], is_awake: Callable[[Slab, str], bool],
        work: Callable[[], int],
    ) -> None:  # fmt: skip
        self._lease, self._is_awake, self._work = lease, is_awake, work
        self._waiting: dict[asyncio.Future[None], tuple[Slab, str]] = {}

    async def wait(self, slab: Slab, role: str, deadline_s: float) -> bool:
        """Waits until the slab is free (role '') or `role` is awake on it; returns False if another role is
        wanted meanwhile.

        Raises:
            WorkerFailed: the slab is quarantined.
            DeadlineExceeded: neither happened, and there was no progress on this node for that long.
        """
        while not self._is_over(slab, role):
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[over] = slab, role
            try:
                await while_moving(over, deadline_s, self._work)
            except TimeoutError:
                raise DeadlineExceeded(self._late(slab, role, deadline_s)) from None
            finally:
                del self._waiting[over]
        lease = self._lease(slab)
        if lease.stage is Stage.QUARANTINED:
            raise WorkerFailed(f"slab {slab.name} is quarantined: {lease.cause}")
        return lease.wanted == role

    def announce(self) -> None:
        """Ends the waits whose condition is now true."""
        for over, (slab, role) in self._waiting.items():
            if not over.done() and self._is_over(slab, role):
                over.set_result(None)

    def _is_over(self, slab: Slab, role: str) -> bool:
        lease = self._lease(slab)
        if lease.stage is Stage.QUARANTINED or lease.wanted != role:
            return True
        return self._is_awake(slab, role) if role else lease.stage is Stage.FREE

    def _late(self, slab: Slab, role: str, waited_s: float) -> str:
        lease = self._lease(slab)
        return (
            f"slab {slab.name}: '{role or 'nobody'}' does not hold it after {waited_s:g} s; it is "
            f"{lease.stage.value} by '{lease.holder}'. {lease.cause}"
        )
