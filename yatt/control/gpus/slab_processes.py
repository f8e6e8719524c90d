"""The worker processes on a node's slabs: signals to them, and the measurement of what they keep."""

import signal

from yatt.control.gpus.memory_check import memory_check_for
from yatt.control.gpus.supervisor import Supervisor
from yatt.control.gpus.worker_plan import Worker
from yatt.control.node import Node
from yatt.core.lease import MemoryChecked
from yatt.core.placement import Slab


class SlabProcesses:
    """Signals and measures the processes on slabs. While a killed process is not reaped, no measurement finds
    its GPUs free."""

    def __init__(self, node: Node, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._memory_check = memory_check_for(node, supervisor)
        self._doomed: set[str] = set()

    def awake(self, slab: Slab, role: str) -> list[Worker]:
        """Returns the running workers of a role on a slab that have not been put to sleep."""
        return [w for w in self._supervisor.of(role, slab) if w.is_running and not w.is_asleep]

    def signal(self, workers: list[Worker], number: signal.Signals) -> None:
        """Sends a signal to the process groups of running workers."""
        for worker in workers:
            if worker.child is None:  # its start is abandoned; then it has ended
                worker.is_unwanted = True
                continue
            worker.child.signal_group(number)
            if number is signal.SIGKILL:
                self._doomed.add(worker.address)

    def purge(self, slab: Slab, spare: str) -> None:
        """Kills the workers of every role but `spare` whose memory keeps the slab from being free."""
        for role in {worker.role for worker in self._memory_check.offenders(slab, spare)}:
            self.signal([w for w in self._supervisor.of(role, slab) if w.is_running], signal.SIGKILL)

    def learn(self, slab: Slab, role: str) -> None:
        """Records the sleeping memory of a role's workers that have just gone to sleep."""
        for worker in self._supervisor.of(role, slab):
            if worker.is_asleep:
                self._memory_check.learn(worker)

    def movable_bytes(self, slab: Slab, role: str) -> int:
        """Returns the most bytes of one GPU that the role's workers may have to move to the host to sleep."""
        return self._memory_check.movable_bytes(slab, self.awake(slab, role))

    def weigh(self, worker: Worker) -> int:
        """Returns the bytes that a worker uses now, measured as for this node's device."""
        return self._memory_check.weigh(worker)

    def measured(self, slab: Slab, wanted: str, gpus: tuple[int, ...]) -> MemoryChecked:
        """Measures whether `gpus` of the slab are free for the role `wanted`; '': for no role."""
        dying = [
            w for w in self._supervisor.workers.values()
            if w.slab == slab and w.address in self._doomed and w.is_running and set(w.gpus) & set(gpus)
        ]  # fmt: skip
        if dying:
            return MemoryChecked(False, f"{', '.join(w.name for w in dying)} is being killed")
        return self._memory_check.check(slab, wanted, gpus)
