"""Checks that a slab is free: compares measured memory with the memory that its sleeping workers may keep.

The device decides which of two measurements is used: NVML with GPUs, resident memory with CPU slots. A
worker's *sleeping memory* is the memory that it kept after its first sleep. This value is fixed: later growth
is a leak and prevents a grant. Engines on CPU are the exception: their sleep frees nothing, so their sleeping
memory is the memory that they had when they fell asleep.
"""

from collections.abc import Iterable
from typing import Protocol

from yatt import clock
from yatt.adapters.memory import ProcessGroups
from yatt.adapters.nvml import Nvml, Occupancy, process_name, sees_host_pids
from yatt.control.gpus.supervisor import Supervisor
from yatt.control.gpus.worker_plan import Worker
from yatt.control.node import Node
from yatt.core.lease import MemoryChecked
from yatt.core.placement import TRAINER, Slab
from yatt.errors import WorkerFailed


class MemoryCheck(Protocol):
    """Measures the memory that workers keep on a slab."""

    def weigh(self, worker: Worker) -> int:
        """Returns the bytes that a worker uses now."""
        ...

    def learn(self, worker: Worker) -> None:
        """Records the sleeping memory of a worker that has just gone to sleep; `check` is called next."""
        ...

    def check(self, slab: Slab, wanted: str) -> MemoryChecked:
        """Checks that the slab is free for `wanted`; '': for no role."""
        ...

    def offenders(self, slab: Slab, wanted: str) -> list[Worker]:
        """Returns the sleeping workers that keep too much memory; all of them if it cannot be attributed."""
        ...


def memory_check_for(node: Node, supervisor: Supervisor) -> MemoryCheck:
    """Returns the memory check for this node's device.

    Raises:
        ConfigError: GPUs are configured, and NVML cannot measure them.
    """
    if node.device == "cuda":
        return GpuMemoryCheck(node, supervisor, Nvml(node.devices), sees_pids=sees_host_pids())
    return SlotMemoryCheck(node, supervisor)


class SlotMemoryCheck:
    """Memory check without GPUs: the resident memory of each sleeping worker's process group."""

    def __init__(self, node: Node, supervisor: Supervisor) -> None:
        self._node, self._supervisor, self._process_groups = node, supervisor, ProcessGroups()
        self._sleeping_bytes: dict[str, int] = {}
        self._just_asleep: set[str] = set()

    def weigh(self, worker: Worker) -> int:
        """Returns the resident bytes of a worker's processes."""
        if worker.child is None:
            return 0
        return self._process_groups.resident_bytes([worker.child.pid], clock.monotonic_s())[worker.child.pid]

    def learn(self, worker: Worker) -> None:
        """Records, at the next measurement, all memory of an engine as its sleeping memory: on CPU an
        engine's sleep frees nothing. This is repeated after each sleep, since its kernels' caches grow with
        every new batch shape. A trainer rank frees its storages and may keep its host copy, and the memory
        that it had before it built anything. One pass over all processes of the machine serves both."""
        if worker.role != TRAINER and worker.child is not None:
            self._just_asleep.add(worker.address)

    def check(self, slab: Slab, wanted: str) -> MemoryChecked:
        """Checks each sleeping worker separately."""
        for worker, used, allowed in self._over(slab, wanted):
            return MemoryChecked(False, keeps(worker, used, allowed))
        return MemoryChecked(True)

    def offenders(self, slab: Slab, wanted: str) -> list[Worker]:
        """Returns the sleeping workers whose process group keeps too much memory."""
        return [worker for worker, _, _ in self._over(slab, wanted)]

    def _over(self, slab: Slab, wanted: str) -> list[tuple[Worker, int, int]]:
        """Returns the sleeping workers above their limit: worker, bytes it keeps, bytes it may keep."""
        slack = self._node.config.lease.slack_bytes
        sleepers = _by_group(w for w in _workers_on(self._node, self._supervisor, slab) if w.role != wanted)
        measured = self._process_groups.resident_bytes(sleepers, clock.monotonic_s())
        for pid, worker in sleepers.items():
            if worker.address in self._just_asleep:
                self._just_asleep.discard(worker.address)
                self._sleeping_bytes[worker.address] = measured[pid]
        allowed = {
            pid: self._sleeping_bytes.get(worker.address, worker.hello_bytes) + worker.host_bytes + slack
            for pid, worker in sleepers.items()
        }
        return [(sleepers[pid], used, allowed[pid]) for pid, used in measured.items() if used > allowed[pid]]


class GpuMemoryCheck:
    """Check with GPUs: no foreign process, and no more memory than baseline and sleeping memory.

    The baseline is the smallest value ever measured, first before any worker was started. So a dying process
    of an earlier attempt raises it only for a short time.

    Args:
        sees_pids: whether NVML's pids are valid here. If not (in most containers), only bytes can be checked:
            memory of foreign processes shows in the sum, but cannot be attributed.
    """

    def __init__(self, node: Node, supervisor: Supervisor, nvml: Nvml, *, sees_pids: bool) -> None:
        self._node, self._supervisor, self._nvml = node, supervisor, nvml
        self._sees_pids, self._process_groups = sees_pids, ProcessGroups()
        self._sleeping_bytes: dict[str, int] = {}
        self._baseline = {slab: nvml.occupancy(slab.gpus).used_bytes for slab in node.slabs}

    def weigh(self, worker: Worker) -> int:
        """Returns the device bytes of a worker's processes; 0 if they cannot be attributed."""
        if worker.slab is None or worker.child is None:
            return 0
        try:
            return self._held(self._measured(worker.slab), [worker]).get(worker.address, 0)
        except WorkerFailed:
            return 0

    def learn(self, worker: Worker) -> None:
        """Records the memory that the worker keeps after its first sleep, at most
        ``lease.max_sleeping_bytes`` on each of its GPUs, since a sleep that frees nothing must not be
        accepted. If the driver does not attribute memory to processes, it is the memory that no other worker
        keeps."""
        if worker.address in self._sleeping_bytes or worker.child is None or worker.slab is None:
            return
        try:
            seen = self._measured(worker.slab)
        except WorkerFailed:
            return  # memory that was not measured is not allowed
        if self._sees_pids and any(seen.processes.values()):
            kept = self._held(seen, [worker]).get(worker.address, 0)
        else:
            others = sum(self._allowed(w) for w in self._all(worker.slab) if w is not worker)
            kept = seen.used_bytes - self._baseline[worker.slab] - others
        most = self._node.config.lease.max_sleeping_bytes * len(worker.gpus)
        self._sleeping_bytes[worker.address] = max(0, min(kept, most))

    def check(self, slab: Slab, wanted: str) -> MemoryChecked:
        """Checks for foreign processes, then each sleeping worker, then the sum."""
        try:
            seen = self._measured(slab)
        except WorkerFailed as error:
            return MemoryChecked(False, str(error))
        workers, slack = self._all(slab), self._node.config.lease.slack_bytes
        strangers = self._strangers(seen)
        if strangers:
            return MemoryChecked(False, f"on slab {slab.name} there is {strangers}; it is not of this run")
        held = self._held(seen, workers)
        for worker in workers:
            used, allowed = held.get(worker.address, 0), self._allowed(worker) + slack
            if worker.role != wanted and used > allowed:
                return MemoryChecked(False, keeps(worker, used, allowed))
        expected = self._baseline[slab] + slack
        expected += sum(
            max(self._allowed(w), held.get(w.address, 0)) if w.role == wanted else self._allowed(w)
            for w in workers
        )
        if seen.used_bytes > expected:
            return MemoryChecked(False, f"{seen.used_bytes >> 20} MiB are in use on slab {slab.name}, where "
                                f"all that sleeps may keep {expected >> 20} MiB")  # fmt: skip
        return MemoryChecked(True)

    def offenders(self, slab: Slab, wanted: str) -> list[Worker]:
        """Uses NVML's list of processes; returns every sleeping worker if that list names none."""
        sleepers = [w for w in self._all(slab) if w.role != wanted]
        try:
            held = self._held(self._measured(slab), sleepers)
        except WorkerFailed:
            return sleepers
        slack = self._node.config.lease.slack_bytes
        over = [w for w in sleepers if held.get(w.address, 0) > self._allowed(w) + slack]
        return over or sleepers

    def _measured(self, slab: Slab) -> Occupancy:
        seen = self._nvml.occupancy(slab.gpus)
        self._baseline[slab] = min(self._baseline[slab], seen.used_bytes)
        return seen

    def _all(self, slab: Slab) -> list[Worker]:
        return _workers_on(self._node, self._supervisor, slab)

    def _allowed(self, worker: Worker) -> int:
        return self._sleeping_bytes.get(worker.address, worker.hello_bytes)

    def _held(self, seen: Occupancy, workers: list[Worker]) -> dict[str, int]:
        """Returns bytes by the worker's address. The kernel lists the processes of each worker every time:
        the leader of a process group is not reaped while we hold it, so its pid cannot be reused."""
        held: dict[str, int] = {}
        if not self._sees_pids:
            return held
        groups = _by_group(workers)
        for pid, group in self._process_groups.members(groups, clock.monotonic_s()).items():
            address = groups[group].address
            held[address] = held.get(address, 0) + seen.processes.get(pid, 0)
        return held

    def _strangers(self, seen: Occupancy) -> str:
        """Describes the processes on the devices that belong to none of this controller's workers."""
        if not self._sees_pids:
            return ""
        own = self._process_groups.members(_by_group(self._supervisor.workers.values()), clock.monotonic_s())
        return ", ".join(
            f"process {pid} ({process_name(pid)}) with {held >> 20} MiB"
            for pid, held in sorted(seen.processes.items())
            if pid not in own
        )


def keeps(worker: Worker, used: int, allowed: int) -> str:
    """Returns the message about a sleeping worker that keeps too much memory."""
    assert worker.child is not None, "only running workers are measured"
    return (
        f"{worker.name} (pid {worker.child.pid}) keeps {used >> 20} MiB of memory, "
        f"{allowed >> 20} MiB are allowed to it asleep"
    )


def _workers_on(node: Node, supervisor: Supervisor, slab: Slab) -> list[Worker]:
    """Returns the running workers of every role that can hold the slab."""
    roles = node.placement.roles_of(slab)
    return [w for role in roles for w in supervisor.of(role, slab) if w.child is not None]


def _by_group(workers: Iterable[Worker]) -> dict[int, Worker]:
    """Maps the ids of process groups to the running workers."""
    return {w.child.pid: w for w in workers if w.child is not None}
